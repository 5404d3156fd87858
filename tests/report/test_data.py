"""Reading a run folder."""

import json
from pathlib import Path
from typing import Any

import pytest

from gaugelasso.errors import UserError
from gaugelasso.report.comparable import load_runs
from gaugelasso.report.data import load_condition, load_run, run_folders, settings
from gaugelasso.report.layout import to_markdown
from gaugelasso.report.methods import check_one_condition
from gaugelasso.report.outcome import outcome
from gaugelasso.report.run import operator_count
from gaugelasso.report.saturation import extents
from gaugelasso.report.tables import structure_table
from gaugelasso.runs.folder import CONFIG_SECTIONS
from tests.report.folders import event, initial_widths, make_run


def test_structure_follows_the_events(tmp_path: Path) -> None:
    run = load_run(make_run(tmp_path / "r"))
    assert run.layers == 2
    assert run.depth_widths("d_f", 0) == [16, 16]
    assert run.depth_widths("d_f", 19) == [16, 16]
    assert run.depth_widths("d_f", 20) == [4, 16]
    assert run.depth_widths("d_ai", 39) == [8, 8]
    assert run.depth_widths("d_ai", 40) == [8, 0]  # the operator was removed
    assert run.widths_at(100)["D"] == 6
    assert operator_count(run.widths_at(0)) == 4
    assert operator_count(run.widths_at(100)) == 3


def test_trajectories_span_the_run(tmp_path: Path) -> None:
    run = load_run(make_run(tmp_path / "r"))
    assert run.fma_trajectory() == ([0, 10, 20, 40, 100], [1000, 1000, 600, 100, 100])
    assert run.axis_trajectory("D") == ([0, 10, 20, 40, 100], [8, 8, 8, 6, 6])
    assert run.axis_trajectory("operators.attention_1.d_k")[1] == [4, 4, 4, 0, 0]
    assert run.cooldown_start == 80
    steps, values = run.column("accuracy")
    assert steps[0] == 20  # rows before the first evaluation have none
    assert values[0] == pytest.approx(0.58)


def test_a_cut_before_the_first_step_is_not_the_beginning(tmp_path: Path) -> None:
    """As post-hoc pruning makes it: the full model is what the run began with."""
    cut = {**initial_widths(2), "operators.mlp_0.d_f": 4}
    run = load_run(make_run(tmp_path / "r", events=[event(0, 1000.0, 300.0, {}, [], cut)]))
    assert run.depth_widths("d_f", 0) == [16, 16]
    assert run.depth_widths("d_f", 1) == [4, 16]
    assert run.fma_trajectory() == ([0, 1, 100], [1000, 300, 300])
    (shrunk, kept) = extents([run])["d_f"]
    assert (shrunk.initial, shrunk.final, kept.share) == (16, 4, 1)
    assert "| initial | 8 | 4/2 | 4 | 8 | 8 | 8 | 16 | 8 |" in to_markdown(structure_table(run))


def test_cooldown_begins_where_the_summary_knows_it(tmp_path: Path) -> None:
    """Rows are of whole intervals; of another cooldown than the first it says nothing."""
    for frozen, start in ((84, 84), (30, 80)):
        path = make_run(tmp_path / str(frozen))
        summary = json.loads((path / "summary.json").read_text())
        (path / "summary.json").write_text(json.dumps(summary | {"frozen_step": frozen}))
        assert load_run(path).cooldown_start == start


def test_outcome_of_a_finished_run_is_its_summary(tmp_path: Path) -> None:
    end = outcome(load_run(make_run(tmp_path / "r")))
    assert end.finished
    assert (end.fma_initial, end.fma_final, end.compression) == (1000, 100, 10)
    assert (end.loss, end.metric, end.reached_step, end.wall_s) == (0.03, 0.9996, 15, 12.5)


def test_outcome_of_a_run_in_progress_is_its_last_row(tmp_path: Path) -> None:
    run = load_run(make_run(tmp_path / "r", rows=3, finished=False, metric="exact_match"))
    end = outcome(run)
    assert not end.finished
    assert run.metric_name == "exact_match"
    assert run.cooldown_start is None
    assert end.loss == pytest.approx(5 / 9)
    assert end.metric == pytest.approx(0.58)
    assert (end.parameters_initial, end.parameters_final) == (2000, 500)
    assert end.training_fma is None


def test_the_metric_is_the_one_that_the_run_names(tmp_path: Path) -> None:
    """Other columns of metrics.jsonl, which later versions may add, are not taken for it."""
    folder = make_run(tmp_path / "r", rows=3, finished=False, metric="exact_match")
    rows = [json.loads(row) for row in (folder / "metrics.jsonl").read_text().splitlines()]
    wider = [{"gradient_norm": 7.0, **row} for row in rows]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in wider))
    run = load_run(folder)
    assert run.metric_name == "exact_match"
    assert outcome(run).metric == pytest.approx(0.58)
    begun = load_run(make_run(tmp_path / "begun", rows=0, finished=False, metric="exact_match"))
    assert begun.metric_name == "exact_match"


def test_the_metric_of_an_early_run_is_found_among_its_columns(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r", rows=3, finished=False, metric="exact_match")
    initial = json.loads((folder / "initial.json").read_text())
    del initial["metric"]
    (folder / "initial.json").write_text(json.dumps(initial))
    run = load_run(folder)
    assert (run.metric_name, run.metric_lower_is_better) == ("exact_match", False)
    assert outcome(run).metric == pytest.approx(0.58)


@pytest.mark.parametrize("metric", [{"name": "accuracy"}, {"name": 3, "lower_is_better": True}])
def test_a_metric_without_name_or_direction_is_refused(
    tmp_path: Path, metric: dict[str, Any]
) -> None:
    folder = make_run(tmp_path / "r")
    initial = json.loads((folder / "initial.json").read_text())
    (folder / "initial.json").write_text(json.dumps(initial | {"metric": metric}))
    with pytest.raises(UserError, match=r"initial\.json': .*'metric\."):
        load_run(folder)


def test_a_run_without_rows_or_events(tmp_path: Path) -> None:
    run = load_run(make_run(tmp_path / "r", rows=0, events=[], finished=False))
    end = outcome(run)
    assert (run.last_step, end.compression, end.loss, end.metric) == (0, 1.0, None, None)
    assert run.fma_trajectory() == ([0], [1000])


@pytest.mark.parametrize("name", ["config.json", "environment.json", "initial.json"])
def test_a_missing_file_of_a_run_folder_is_named(tmp_path: Path, name: str) -> None:
    folder = make_run(tmp_path / "r")
    (folder / name).unlink()
    with pytest.raises(UserError, match=f"'{folder}' is not a run folder: {name} is missing"):
        load_run(folder)


def test_the_error_for_a_folder_of_runs_lists_them(tmp_path: Path) -> None:
    make_run(tmp_path / "sweep" / "seed7")
    with pytest.raises(UserError, match="it contains run folders: seed7"):
        load_run(tmp_path / "sweep")
    with pytest.raises(UserError, match="no such folder"):
        load_run(tmp_path / "nowhere")


def test_a_folder_stands_for_the_runs_in_it(tmp_path: Path) -> None:
    one = make_run(tmp_path / "one")
    seeds = [make_run(tmp_path / "arms" / arm / "seed1") for arm in ("a", "b")]
    (tmp_path / "arms" / "report").mkdir()
    assert run_folders([one, tmp_path / "arms", one]) == [one, *seeds]
    assert run_folders([tmp_path / "arms" / "b"]) == seeds[1:]
    for nothing in (tmp_path / "arms" / "report", tmp_path / "nowhere"):
        assert run_folders([nothing]) == [nothing]  # for `load_run` to refuse
    with pytest.raises(UserError, match="is not a run folder: it is a file"):
        load_run(one / "config.json")


@pytest.mark.parametrize("section", CONFIG_SECTIONS)
def test_a_config_without_one_of_its_sections_is_refused(tmp_path: Path, section: str) -> None:
    folder = make_run(tmp_path / "r")
    assert {key.partition(".")[0] for key in settings(load_run(folder))} == {*CONFIG_SECTIONS}
    config = json.loads((folder / "config.json").read_text())
    del config[section]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=rf"config\.json': key '{section}' is missing"):
        load_run(folder)


def test_runs_of_a_condition_are_sorted_by_seed(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / f"s{seed}", seed=seed) for seed in (5, 1, 3)]
    assert [run.seed for run in load_condition(folders)] == [1, 3, 5]


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("task.name", {"task": {"name": "other"}}),
        ("task.name", {"task": {"name": "other"}, "compress": {"accounting": "paper"}}),
        ("task.length", {"task": {"length": 32}}),
        ("compress.accounting", {"compress": {"accounting": "paper"}}),
        ("target.loss", {"target": {"loss": 0.5}}),
        ("train.steps", {"train": {"steps": 200}}),
    ],
)
def test_runs_of_two_conditions_are_refused(
    tmp_path: Path, key: str, changes: dict[str, Any]
) -> None:
    first = make_run(tmp_path / "a", seed=1)
    second = make_run(tmp_path / "b", seed=2, changes=changes)
    with pytest.raises(UserError, match=f"not runs of one condition: {key} is"):
        load_condition([first, second])


def test_logging_and_unknown_settings_do_not_separate_conditions(tmp_path: Path) -> None:
    first = make_run(tmp_path / "a", seed=1)
    changes = {"train": {"eval_every": 40, "threads": 2}, "compress": {"later": 1.0}}
    assert len(load_condition([first, make_run(tmp_path / "b", seed=2, changes=changes)])) == 2


def test_a_setting_that_a_version_lacked_does_not_separate_runs(tmp_path: Path) -> None:
    """Two that have it and differ are found, also with a run without it between them."""
    names = [tmp_path / name for name in "abc"]
    for seed, (name, value) in enumerate(zip(names, (1.0, None, 2.0), strict=True)):
        changes = {} if value is None else {"task": {"later": value}}
        make_run(name, seed=seed, changes=changes)
    check_one_condition([load_run(name) for name in names[:2]])
    with pytest.raises(UserError, match=r"task\.later is 1\.0 in one and 2\.0 in the other"):
        check_one_condition([load_run(name) for name in names])


def test_a_repeated_seed_is_refused(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", seed=1)
    with pytest.raises(UserError, match="both have seed 1"):
        load_condition([folder, folder])
    with pytest.raises(UserError, match="no run folder given"):
        load_condition([])


def test_runs_of_two_methods_are_not_one_condition(tmp_path: Path) -> None:
    """Rivals have the same settings, and a mean over two of them would mean nothing."""
    one = make_run(tmp_path / "one", seed=1, method="post-hoc")
    other = make_run(tmp_path / "other", seed=2, method="torch-pruning-magnitude")
    with pytest.raises(UserError, match="the method is 'post-hoc' in one and 'torch-pruning-mag"):
        load_condition([one, other])


def test_other_code_of_the_task_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pair = [make_run(tmp_path / name, seed=seed) for seed, name in enumerate("ab")]
    for run, digest in zip(pair, ("1", "2"), strict=True):
        made = json.loads((run / "environment.json").read_text())
        (run / "environment.json").write_text(json.dumps(made | {"code": {"task": digest}}))
    load_runs(pair)
    assert "the code of the task or model of" in caplog.text
