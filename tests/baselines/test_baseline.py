"""The command baseline: what it trains, goes on with, refuses and writes."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gaugelasso.baselines import search
from gaugelasso.baselines.ladder import ladder
from gaugelasso.baselines.members import median_row, run_row
from gaugelasso.baselines.setting import Bar, loss_of, uniform_settings
from gaugelasso.cli import app
from gaugelasso.config import run_config
from gaugelasso.errors import UserError
from gaugelasso.report import heatmap, profile, training, worth, write_report
from gaugelasso.report.baseline import baseline_of, load_baseline, sentences
from gaugelasso.report.data import load_run
from gaugelasso.report.toml import to_toml
from gaugelasso.runs.checkpoint import load_spec
from gaugelasso.sweeps import sweep
from tests.baselines.in_process import train_here
from tests.command import Command, assert_user_error
from tests.tiny_runs import contents, finish, finished, read

PNG = b"\x89PNG"
OPTIONS = ("--scale", "dims", "--repeats", "3")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run that held its target."""
    return finished(tmp_path_factory.mktemp("trained"))


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "run")


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """No processes, and pictures that take no time."""
    monkeypatch.setattr(search, "run_sweep", train_here)
    for module in (profile, training, heatmap, worth):
        for name in [name for name in vars(module) if name.startswith("draw_")]:
            monkeypatch.setattr(module, name, lambda _, path: path.write_bytes(PNG))


@pytest.fixture(scope="module")
def complete(trained: Path) -> tuple[Path, str]:
    """A run with its baseline, and what the command printed."""
    run = shutil.copytree(trained, trained.parent / "complete")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "run_sweep", train_here)
        done = CliRunner().invoke(app, ["baseline", str(run), *OPTIONS])
    assert done.exit_code == 0
    return run, done.output


def summaries(out: Path) -> dict[str, int]:
    """When each run of a baseline ended."""
    found = out.glob("*/seed*/summary.json")
    return {str(path.relative_to(out)): path.stat().st_mtime_ns for path in found}


def test_the_result_has_the_figures_of_all_models(complete: tuple[Path, str]) -> None:
    run, output = complete
    data, summary = load_baseline(run / "baseline" / "baseline.json"), read(run / "summary.json")
    assert data["loss"] == data["limit"] == summary["selection_loss"]
    assert (data["steps"], data["seeds"]) == (summary["steps"], [3])
    own, *uniform, again = data["rows"]
    assert (own["kind"], own["held"]) == ("run", True)
    keys = {"fma": "fma_final", "parameters": "parameters_final", "loss": "loss",
            "selection_loss": "selection_loss", "training_fma": "training_fma"}  # fmt: skip
    assert {key: own[key] for key in keys} == {key: summary[old] for key, old in keys.items()}
    # The ladder has every width of the tiny model, of which the search trains a part.
    config = run_config(run)
    widths = [row["widths"]["width"] for row in uniform]
    assert widths == sorted(widths)
    assert widths[-1] == config.model.width
    assert 2 <= len(widths) < len(ladder(config, "dims"))
    for row in uniform:
        assert row["held"] == (row["selection_loss"] <= data["limit"])
        assert row["training_fma"] == row["fma"] * summary["steps"]  # nothing was cut
    reached = [row["name"] for row in uniform if row["held"]]
    assert data["smallest_uniform"] == (reached[0] if reached else None)
    assert (again["fma"], again["parameters"]) == (own["fma"], own["parameters"])
    assert again["loss"] != own["loss"]
    assert all(row["latency_ms"] > 0 for row in (own, again, uniform[-1]))
    for line in sentences(data):
        assert line in output


@pytest.mark.usefixtures("in_process")
def test_a_finished_model_is_not_trained_again(
    gaugelasso: Command, complete: tuple[Path, str], tmp_path: Path
) -> None:
    run = shutil.copytree(complete[0], tmp_path / "run")
    out = run / "baseline"
    rows, before = read(out / "baseline.json")["rows"], summaries(out)
    assert len(before) == len(rows) - 1
    # One run is lost: it alone is trained again, to the same figures.
    lost = next(out.glob("width8-*")) / "seed3"
    shutil.rmtree(lost)
    (out / "baseline.json").unlink()
    assert gaugelasso("baseline", run, *OPTIONS)[0] == 0
    after, name = summaries(out), str(lost.relative_to(out) / "summary.json")
    assert after.pop(name) != before.pop(name)
    assert after == before
    again = read(out / "baseline.json")["rows"]
    assert [row["loss"] for row in again] == [row["loss"] for row in rows]


def test_a_tolerance_without_an_end_is_refused(gaugelasso: Command, tmp_path: Path) -> None:
    answer = gaugelasso("baseline", tmp_path / "run", "--tolerance", "inf")
    assert_user_error(answer, "--tolerance inf: must be a finite number")


@pytest.mark.usefixtures("in_process")
def test_the_report_of_a_run_has_its_baseline(complete: tuple[Path, str], tmp_path: Path) -> None:
    run = shutil.copytree(complete[0], tmp_path / "run")
    files = write_report([run])
    assert files.baseline
    assert files.baseline.read_bytes() == PNG
    page = files.page.read_text()
    assert page.count(">What it is worth<") == 1
    assert "All models that were trained" in files.tables.read_text()
    path = run / "baseline" / "baseline.json"
    data = json.loads(path.read_text())
    del data["rows"][1]["fma"]
    path.write_text(json.dumps(data))
    with pytest.raises(UserError, match=r"row 2 of .*baseline\.json': key 'fma' is missing"):
        write_report([run])


@pytest.mark.usefixtures("in_process")
def test_a_baseline_of_an_earlier_run_is_not_reported(
    complete: tuple[Path, str], tmp_path: Path
) -> None:
    run = shutil.copytree(complete[0], tmp_path / "run")
    edit(run, fma_final=1.0)
    assert baseline_of(load_run(run)) is None
    files = write_report([run])
    assert files.baseline is None
    assert "What it is worth" not in files.page.read_text()


def test_the_picture_is_drawn(complete: tuple[Path, str]) -> None:
    picture = (complete[0] / "baseline" / "baseline.png").read_bytes()
    assert picture.startswith(PNG)
    assert len(picture) > 10_000


@pytest.mark.usefixtures("in_process")
def test_seeds_and_tolerance(gaugelasso: Command, run: Path, tmp_path: Path) -> None:
    """Any loss is within the tolerance: the search goes down to the smallest model.

    The ladder is that of a narrower model than the run began with.
    """
    out = tmp_path / "out"
    options = ("--out", out, "--seeds", "2", "--jobs", "4", "--scale", "heads", "--repeats", "3")
    options = ("--tolerance", "1e6", "--set", "model.width=2", *options)
    code, output, err = gaugelasso("baseline", run, *options)
    assert (code, err) == (0, "")
    assert not (run / "baseline").exists()
    data = load_baseline(out / "baseline.json")
    assert data["limit"] > 1e5
    assert data["full"] == "width 2, 2 heads of 4"
    assert data["smallest_is_bottom"]
    assert data["smallest_uniform"] == "width 1, 1 head of 4"
    assert all([one["seed"] for one in row["runs"]] == [3, 4] for row in data["rows"][1:])
    assert "reached the loss with 2 of 2 seeds" in output
    assert "That is the smallest model of the ladder" in output


def test_the_runs_of_a_baseline_have_the_schedule_of_the_run(run: Path) -> None:
    """Of a run that a work target froze at step 25 of 37."""
    summary = {**read(run / "summary.json"), "steps": 37, "frozen_step": 25}
    config = uniform_settings(run, summary, {"compress.lr": "0.01"})
    assert (config.train.steps, config.train.warmup, config.train.cooldown) == (37, 4, 12)
    assert (config.compress.solver, config.compress.rho) == ("fixed", 0.0)
    assert config.compress.lr == 0.01
    assert (config.task, config.model) == (run_config(run).task, run_config(run).model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("task.length=8", "--set task.length=8: a baseline takes task.length from its run"),
        ("train.steps=8", "a baseline takes train.steps from its run"),
        ("train.seed=8", "--set train.seed=8: leave it out; seeds are given by --seeds"),
        ("compress.rho=1", "a baseline has no pressure and makes no use of compress.rho"),
        ("compress.trsut=1", "unknown key compress.trsut"),
    ],
)
def test_what_a_baseline_takes_from_its_run_cannot_be_set(
    gaugelasso: Command, run: Path, change: str, message: str
) -> None:
    assert_user_error(gaugelasso("baseline", run, "--set", change), message)
    assert not (run / "baseline").exists()


def edit(run: Path, **changes: Any) -> None:
    path = run / "summary.json"
    path.write_text(json.dumps({**read(path), **changes}))


def test_runs_without_a_loss_to_reach_are_refused(gaugelasso: Command, run: Path) -> None:
    edit(run, held=False, loss=2.5)
    assert_user_error(gaugelasso("baseline", run), "missed its target: its loss is 2.5 and target")
    edit(run, held=True, selection_loss=None)
    assert_user_error(gaugelasso("baseline", run), "summary.json': no selection_loss")
    (run / "summary.json").unlink()
    assert_user_error(gaugelasso("baseline", run), "is not finished: summary.json is missing")
    assert_user_error(gaugelasso("baseline", run / "none"), "no such folder")
    assert not (run / "baseline").exists()


def test_a_run_that_began_with_another_structure_is_refused(gaugelasso: Command, run: Path) -> None:
    """As by train --structure: its config does not describe the model that it began with."""
    initial = {**read(run / "initial.json"), "structure": read(run / "summary.json")["structure"]}
    (run / "initial.json").write_text(json.dumps(initial))
    assert_user_error(gaugelasso("baseline", run), "did not begin with the uniform model")


def test_a_run_of_a_model_of_the_user_is_refused(
    gaugelasso: Command, run: Path, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text("def build(): ...\n")
    config = {**read(run / "config.json"), "model": {"module": f"{tmp_path}/own.py:build"}}
    (run / "config.json").write_text(json.dumps(config))
    assert_user_error(gaugelasso("baseline", run), "how to narrow that is not known")
    assert not (run / "baseline").exists()


def test_a_folder_of_another_baseline_is_refused(gaugelasso: Command, run: Path) -> None:
    out = run / "baseline"
    out.mkdir()
    (out / "structure.json").write_text("{}")
    assert_user_error(gaugelasso("baseline", run), "the folder holds the baseline of another run")
    (out / "structure.json").unlink()
    (out / "config.toml").write_text("[compress]\nlr = 0.5\n[task]\nname = 'retrieval'\n")
    before = contents(out)
    assert_user_error(gaugelasso("baseline", run), "but the baseline in ")
    assert contents(out) == before


def test_a_run_that_fails_ends_the_search(
    gaugelasso: Command, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "_POLL_S", 0.02)
    monkeypatch.setattr("sys.executable", "false")
    answer = gaugelasso("baseline", run, "--scale", "dims", "--jobs", "2")
    assert_user_error(answer, "2 of 2 runs failed: width 8, 2 heads of 4, seeds 3; retrained, seed")
    assert not (run / "baseline" / "baseline.json").exists()


def row(loss: float | None) -> dict[str, Any]:
    figures = {"fma": 8.0, "parameters": 8, "training_fma": 80.0, "metric": 0.5}
    return {**figures, "selection_loss": loss, "loss": loss}


def test_half_of_the_seeds_decide() -> None:
    bar = Bar(0.1, tolerance=0.1)
    assert median_row([row(0.109), row(None)], bar)["held"]
    assert not median_row([row(0.109), row(None), row(0.2)], bar)["held"]
    assert median_row([row(0.2), row(0.1), row(0.0)], bar)["selection_loss"] == 0.1
    assert median_row([row(None)], bar)["loss"] is None
    assert Bar(-2.0, tolerance=0.5).limit == -1.0


def test_the_loss_to_reach_is_that_on_selection_data(run: Path) -> None:
    assert loss_of(run, {"held": True, "loss": 1.0, "selection_loss": 2.0}) == 2.0


def test_sentences_name_what_is_not_monotone_and_where_no_model_reached() -> None:
    rows = [
        {"name": "run", "kind": "run", "fma": 50.0, "held": True, "runs": [{"held": True}]},
        *(
            {"name": f"width {width}", "kind": "uniform", "fma": 10.0 * width, "held": width != 8}
            for width in (6, 8, 9)
        ),
        {"name": "retrained", "kind": "retrained", "selection_loss": 0.3, "fma": 50.0,
         "runs": [{"held": False}, {"held": True}]},
    ]  # fmt: skip
    data = {"rows": rows, "limit": 0.25, "steps": 1000, "full": "width 9",
            "smallest_uniform": "width 6", "smallest_is_bottom": False}  # fmt: skip
    first, again, odd = sentences(data)
    assert "has 60 FMA per token (width 6); the run's model has 50: 1.20× less" in first
    assert "Against the full model it is 1.80× less" in first
    assert "with 1 of 2 seeds: selection loss 0.3" in again
    assert "Not monotone: width 8 has more work" in odd
    first, *_ = sentences({**data, "smallest_uniform": None})
    assert first.startswith("No uniform model up to the full one (90 FMA per token) reached the")


# --- train --structure ----------------------------------------------------------------


def test_a_structure_is_trained_with_new_weights(gaugelasso: Command, run: Path) -> None:
    config, out = run.parent / "config.toml", run.parent / "again"
    plain = uniform_settings(run, read(run / "summary.json"), {})
    config.write_text(to_toml(plain.to_dict()))
    command = ("train", config, "--out", out, "--structure", run)
    assert gaugelasso(*command)[0] == 0
    assert load_spec(out / "initial.json") == load_spec(out) == load_spec(run)
    # Resumed with the same structure it goes on; with another it is refused.
    assert gaugelasso(*command, "--resume")[0] == 0
    before = contents(out)
    other = ("train", config, "--out", out, "--structure", run / "initial.json", "--resume")
    assert_user_error(gaugelasso(*other), "--structure is not what the run began with")
    assert contents(out) == before


def test_a_structure_of_another_task_is_refused(gaugelasso: Command, run: Path) -> None:
    structure = {**read(run / "summary.json")["structure"], "inputs": 9}
    path = run.parent / "structure.json"
    path.write_text(json.dumps(structure))
    config = run.parent / "config.toml"
    config.write_text(to_toml(run_config(run).to_dict()))
    before = contents(run)
    answer = gaugelasso("train", config, "--out", run, "--structure", path, "--overwrite")
    assert_user_error(answer, "--structure: its inputs is 9, and task 'retrieval' needs 8")
    assert contents(run) == before


def test_the_run_of_a_structure_is_not_overwritten(gaugelasso: Command, run: Path) -> None:
    config = run.parent / "config.toml"
    config.write_text(to_toml(run_config(run).to_dict()))
    before = contents(run)
    answer = gaugelasso("train", config, "--out", run, "--structure", run, "--overwrite")
    assert_user_error(answer, "structure.json', which the run begins with; choose another --out")
    assert contents(run) == before


def test_a_run_that_is_priced_in_bytes_is_compared_in_fma(tmp_path: Path) -> None:
    run = finish(tmp_path, compress__accounting="bytes")
    summary = read(run / "summary.json")
    assert uniform_settings(run, summary, {}).compress.accounting == "fma"
    row = run_row(run, Bar(10.0))
    assert row["fma"] == summary["costs"]["fma"] != summary["fma_final"]
    assert summary["training_fma"] < summary["steps"] * read(run / "initial.json")["costs"]["fma"]
