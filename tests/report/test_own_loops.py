"""Runs that own loops recorded: they name no seed, and are told apart by their folders."""

import json
from pathlib import Path

import pytest

from gaugelasso import Transformer, TransformerSpec
from gaugelasso.errors import UserError
from gaugelasso.report import write_methods, write_report
from gaugelasso.report.advice import advise
from gaugelasso.report.compare import compare, compare_table, load_runs
from gaugelasso.report.data import load_condition
from gaugelasso.report.pareto import load_points, pareto_table
from tests.training.test_own_loop import loop

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


def test_the_same_folder_twice_is_refused(own: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(own / "a")
    with pytest.raises(UserError, match="both have the same folder; give only one of them"):
        load_condition([own / "a", own / "b", tmp_path / "link"])


def test_there_is_no_config_to_advise_on(own: Path) -> None:
    with pytest.raises(UserError, match=r"a loop of your own, which has no config to rewrite: .*"):
        advise([own / "a"])
