"""Runs that own loops recorded: they name no seed, and are told apart by their folders."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from gaugelasso import Transformer, TransformerSpec
from gaugelasso.errors import UserError
from gaugelasso.export import export
from gaugelasso.report import write_methods, write_report
from gaugelasso.report.advice import advise
from gaugelasso.report.comparable import load_runs
from gaugelasso.report.compare import compare, compare_table
from gaugelasso.report.data import load_condition, load_run
from gaugelasso.report.pareto import load_points, pareto_table
from tests.command import Command
from tests.tiny_runs import read
from tests.training.test_own_loop import image, loop

NOTE = "Own loops name no seed and no data"


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of the same settings, and one of another model."""
    home = tmp_path_factory.mktemp("own")
    wider = TransformerSpec.uniform(
        width=12, layers=1, heads=2, d_k=4, d_v=4, d_f=8, length=6, inputs=8, outputs=9
    )
    for name, model in (("a", None), ("b", None), ("wider", Transformer(wider))):
        loop(home / name, steps=20, loss_target=9.0, model=model)
    return home


def test_runs_of_equal_settings_are_compared_by_folder(own: Path, tmp_path: Path) -> None:
    found = compare(load_runs([own / "b", own / "a"]))
    table = compare_table(found)
    assert table.headers[1] == "run"
    runs = ["2 runs", str(own / "a"), str(own / "b")]
    assert [row[1] for row in table.rows] == runs
    assert NOTE in table.note
    files = write_methods(found, tmp_path / "out", tmp_path / "results.json")
    results = json.loads(files["results"].read_text())
    assert [run["folder"] for run in results["runs"]] == runs[1:]


def test_runs_of_equal_settings_are_reported_together(own: Path, tmp_path: Path) -> None:
    files = write_report([own / "a", own / "b"], tmp_path)
    text = files.tables.read_text()
    for part in (f"| {own / 'a'} |", f"Structure, run {own / 'b'}", "of 2 runs", NOTE):
        assert part in text
    page = files.page.read_text()
    for part in (f"<summary>run {own / 'b'}</summary>", f'"title":"run {own / "b"}"'):
        assert part in page
    assert "seed 0" not in text + page


def test_the_front_names_folders(own: Path) -> None:
    table = pareto_table(load_points([own / "a", own / "wider"]))
    assert table.headers[-1] == "runs on the front"
    assert {row[-1] for row in table.rows} <= {str(own / "a"), str(own / "wider"), "—"}
    assert NOTE in table.note


def test_other_models_are_other_conditions(own: Path) -> None:
    """The config of an own loop does not describe its model."""
    assert len(load_points([own])) == 2
    with pytest.raises(UserError, match=r"not runs of one condition: model\.fma is .* in one"):
        load_condition([own / "a", own / "wider"])


ON_BATCHES = "loss on the last training batches"


@pytest.mark.parametrize("held_out", [False, True])
def test_a_loss_is_named_by_where_it_was_measured(
    held_out: bool, tmp_path: Path, gaugelasso: Command
) -> None:
    pair = run, other = tmp_path / "run", tmp_path / "other"
    name = "held-out loss" if held_out else ON_BATCHES
    changes: dict[str, Any] = {"evaluate": lambda: 1.25} if held_out else {}
    loop(run, steps=20, loss_target=9.0, **changes)
    shutil.copytree(run, other)
    summary = read(run / "summary.json")
    assert summary["metric"] == {"name": name, "value": summary["loss"]}
    told = gaugelasso("info", run)[1]
    assert f"{name[0].upper()}{name[1:]} " in told
    text = write_report([run], tmp_path / "report").tables.read_text()
    front, methods = pareto_table(load_points([run])), compare_table(compare(load_runs(pair)))
    # One column or row, because the metric is this loss.
    for heads in (front.headers, methods.headers):
        assert heads.count(name) == 1
    assert text.count(f"| {name} |") == 1
    assert ("held-out" in told + text + " ".join(front.headers)) is held_out


def test_a_metric_that_only_some_loops_have_is_not_shown(tmp_path: Path) -> None:
    """Else its column would have the metric of some and the loss of others."""
    pair = tmp_path / "with", tmp_path / "without"
    loop(pair[0], steps=20, loss_target=9.0, metric_target=0.25, evaluate=lambda: (1.25, 0.5))
    loop(pair[1], steps=20, loss_target=9.0, evaluate=lambda: 1.5)
    found = compare(load_runs(pair))
    table, front = compare_table(found), pareto_table(load_points(pair))
    for heads in (table.headers, front.headers):
        assert "held-out loss" in heads
        assert "metric" not in heads
    assert "No metric is shown, because not all runs have the same one" in table.note
    files = write_methods(found, tmp_path / "out", tmp_path / "results.json")
    results = json.loads(files["results"].read_text())
    assert results["metric_name"] is None
    assert [method["metric"] for method in results["methods"]] == [None, None]
    again = shutil.copytree(pair[0], tmp_path / "again")
    assert "metric" in compare_table(compare(load_runs([pair[0], again]))).headers


def test_the_card_of_an_export_says_what_is_known(own: Path, tmp_path: Path) -> None:
    card = (export(own / "a", "native", tmp_path / "out").folder / "README.md").read_text()
    for said in ("Measured on the last training batches by the run", f"| {ON_BATCHES} |"):
        assert said in card
    for unknown in ("held-out", "| seed |", "| fma |"):
        assert unknown not in card


def test_a_training_loss_that_stays_above_is_no_miss(tmp_path: Path, gaugelasso: Command) -> None:
    """As with label smoothing: what is evaluated is less than what is trained."""
    loop(tmp_path / "run", steps=20, loss_target=0.5, evaluate=lambda: 0.25)
    assert read(tmp_path / "run" / "summary.json")["target_reached_step"] is None
    told = gaugelasso("info", tmp_path / "run")[1]
    assert "Held-out loss 0.25, within the loss target of 0.5" in told


def test_a_run_goes_on_with_the_evaluate_that_it_began_with(tmp_path: Path) -> None:
    run = tmp_path / "run"
    loop(run, (10,), steps=20, loss_target=9.0, evaluate=lambda: 1.25)
    at, on = image(run, 10), r"is measured on held-out data, and now on the last training batches"
    with pytest.raises(UserError, match=f"{on}; give evaluate=... as before"):
        loop(at, steps=20, loss_target=9.0, resume=True)
    on = r"is measured on the last training batches, and now on held-out data; leave evaluate out"
    loop(tmp_path / "other", (10,), steps=20, loss_target=9.0)
    again: dict[str, Any] = {"steps": 20, "resume": True, "evaluate": lambda: 1.25}
    again["loss_target"] = 9.0
    with pytest.raises(UserError, match=f"{on} as before"):
        loop(image(tmp_path / "other", 10), **again)


def test_a_run_of_an_early_version_goes_on_and_is_named_by_its_place(
    tmp_path: Path, gaugelasso: Command
) -> None:
    """Early versions did not say where a loss was measured, and called it held-out everywhere."""
    run = tmp_path / "run"
    loop(run, (10,), steps=20, loss_target=9.0, evaluate=lambda: 1.25)
    at = image(run, 10)
    initial = read(at / "initial.json")
    del initial["evaluated_on"]
    (at / "initial.json").write_text(json.dumps(initial))
    loop(at, steps=20, loss_target=9.0, resume=True)
    assert read(at / "summary.json")["metric"]["name"] == "held-out loss"
    told = gaugelasso("info", at)[1]
    assert "held-out" not in told
    assert ON_BATCHES in told
    assert all(ON_BATCHES in row for row in load_run(at).metrics)


def test_losses_of_different_places_are_not_put_together(tmp_path: Path) -> None:
    pair = tmp_path / "with", tmp_path / "without"
    loop(pair[0], steps=20, loss_target=9.0, evaluate=lambda: 1.25)
    loop(pair[1], steps=20, loss_target=9.0)
    for read_both in (load_condition, load_points, load_runs):
        with pytest.raises(UserError, match=r"task\.evaluated_on is 'held-out data' in"):
            read_both(pair)


def test_the_same_folder_twice_is_refused(own: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(own / "a")
    with pytest.raises(UserError, match="both have the same folder; give only one of them"):
        load_condition([own / "a", own / "b", tmp_path / "link"])


def test_there_is_no_config_to_advise_on(own: Path) -> None:
    with pytest.raises(UserError, match=r"a loop of your own, which has no config to rewrite: .*"):
        advise([own / "a"])
