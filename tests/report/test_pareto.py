"""Held-out loss against work: which runs are on the front, and which may be compared."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from gaugelasso.errors import UserError
from gaugelasso.report import pareto, write_pareto
from gaugelasso.report.condition_labels import condition_labels
from gaugelasso.report.data import load_run
from gaugelasso.report.figure import GREY
from gaugelasso.report.pareto import draw_pareto, front, load_points, pareto_table
from gaugelasso.runs.reading import OWN_LOOP
from tests.report.folders import event, initial_widths, make_run
from tests.report.test_compare import change_summary


def run_at(path: Path, fma: float, loss: float, **options: Any) -> Path:
    drops = [event(40, 1000.0, fma, {"D": 1}, [], initial_widths(2))]
    return make_run(path, events=drops, loss=loss, **options)


def two_targets(root: Path) -> Path:
    """Loose: (100, 0.2) and (110, 0.3); tight: (400, 0.01) and (300, 0.02)."""
    places = {"loose": [(100, 0.2), (110, 0.3)], "tight": [(400, 0.01), (300, 0.02)]}
    for name, target in (("loose", 0.5), ("tight", 0.05)):
        for seed, (fma, loss) in enumerate(places[name]):
            changes = {"target": {"loss": target}}
            run_at(root / name / f"seed{seed}", fma, loss, seed=seed, changes=changes)
    return root


def test_every_run_on_the_front_has_less_loss_than_cheaper_runs() -> None:
    places = [(3.0, 1.0), (1.0, 5.0), (2.0, 5.0), (2.0, 2.0), (4.0, 1.0), (1.0, 6.0)]
    assert front(places) == [(1.0, 5.0), (2.0, 2.0), (3.0, 1.0)]


def test_conditions_are_named_by_what_differs(tmp_path: Path) -> None:
    points = load_points([two_targets(tmp_path)])
    assert [*points] == ["target.loss = 0.05", "target.loss = 0.5"]  # most work first
    assert [(p.fma, p.loss, p.best) for p in points["target.loss = 0.5"]] == [
        (100, 0.2, True),
        (110, 0.3, False),
    ]
    table = pareto_table(points)
    assert table.rows[1] == [
        "target.loss = 0.5", "0.5", "2", "105 ± 7.1", "9.55× ± 0.64×", "0.25 ± 0.07071",
        "99.96%", "0",
    ]  # fmt: skip


def test_folders_name_the_conditions_if_many_settings_differ(tmp_path: Path) -> None:
    changes = {"model": {"width": 16, "heads": 2}, "target": {"loss": 0.5}}
    for seed in range(2):
        run_at(tmp_path / "small" / f"s{seed}", 100, 0.1, seed=seed)
        run_at(tmp_path / "wide" / f"s{seed}", 200, 0.1, seed=seed, changes=changes)
    folders = [tmp_path / "small", tmp_path / "wide"]
    # A key that one run lacks does not separate conditions.
    assert len(load_points(folders)) == 2
    for run in folders[0].iterdir():
        config = json.loads((run / "config.json").read_text())
        config["model"]["heads"] = 4
        (run / "config.json").write_text(json.dumps(config))
    assert [*load_points(folders)] == [str(tmp_path / "wide"), str(tmp_path / "small")]


def test_a_key_that_one_run_lacks_still_separates_the_others(tmp_path: Path) -> None:
    """As runs of an early version lack a setting that came later."""
    run_at(tmp_path / "early", 100, 0.1)
    for name, value in (("off", 0), ("on", 500)):
        changes = {"compress": {"exchange": value}}
        run_at(tmp_path / name, 200, 0.1, changes=changes)
    runs = [load_run(tmp_path / name) for name in ("early", "off", "on")]
    expected = [f"compress.exchange = {value}" for value in ("none", 0, 500)]
    assert condition_labels(runs) == expected
    assert condition_labels(runs[::-1]) == expected[::-1]


def test_methods_of_equal_settings_are_conditions_of_their_own(tmp_path: Path) -> None:
    """Rivals get the same settings. One with other options is another condition too."""
    rivals = {"a": ("post-hoc", 3), "b": ("torch-pruning-magnitude", 3), "c": ("post-hoc", 4)}
    for name, (method, rounds) in rivals.items():
        for seed in range(2):
            run = run_at(tmp_path / f"{name}{seed}", 100, 0.1, seed=seed, method=method)
            change_summary(run, pruning={"fma": 110.0, "rounds": rounds})
    run_at(tmp_path / "ours", 100, 0.1)
    assert {label: len(points) for label, points in load_points([tmp_path]).items()} == {
        "post-hoc (rounds = 3)": 2, "post-hoc (rounds = 4)": 2, "torch-pruning-magnitude": 2,
        "compression": 1,
    }  # fmt: skip
    only = [tmp_path / name for name in ("a0", "c0")]
    assert {*load_points(only)} == {"rounds = 3", "rounds = 4"}


def test_a_seed_that_occurs_twice_is_refused(tmp_path: Path) -> None:
    for name in "ab":
        run_at(tmp_path / name, 100, 0.1)
    with pytest.raises(UserError, match=r"a' and .*b' are both one condition, seed 0; give only"):
        load_points([tmp_path])


def test_own_loops_whose_seeds_are_not_known_are_averaged(tmp_path: Path) -> None:
    for name in "ab":
        run = run_at(tmp_path / name, 100, 0.1)
        config = json.loads((run / "config.json").read_text())
        (run / "config.json").write_text(json.dumps(config | {"task": {"name": OWN_LOOP}}))
    assert [len(points) for points in load_points([tmp_path]).values()] == [2]


def test_plain_training_aims_at_no_target(tmp_path: Path) -> None:
    """The target in its config is a number to pass."""
    run_at(tmp_path / "plain", 1000, 0.04, method="plain")
    run_at(tmp_path / "ours", 100, 0.1)
    table = pareto_table(load_points([tmp_path]))
    assert [row[:2] for row in table.rows] == [["full", "—"], ["compression", "0.05"]]
    assert table.headers[1] == "loss target"


def test_the_first_folder_names_a_condition_if_nothing_else_is_short(tmp_path: Path) -> None:
    """Conditions in one folder that differ in many settings: their list would fill the picture."""
    many = {"compress": {"interval": 7, "trust": 3.0, "beta": 0.9, "anchor": 0.5}}
    many |= {"model": {"width": 16, "heads": 2}, "target": {"loss": 0.5}}
    base = {"compress": {"interval": 8, "trust": 4.0, "beta": 0.8, "anchor": 0.6}}
    base |= {"model": {"width": 32, "heads": 4}, "target": {"loss": 0.6}}
    for name, changes in (("a", base), ("b", many)):
        for seed in range(2):
            run_at(tmp_path / f"{name}{seed}", 100, 0.1, seed=seed, changes=changes)
    assert {*load_points([tmp_path])} == {f"{tmp_path / name}0 and 1 more" for name in "ab"}


def test_points_and_front_of_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(pareto, "save", lambda figure, path: figures.append(figure))
    points = load_points([two_targets(tmp_path)])
    draw_pareto(points, io.BytesIO())
    (axes,) = figures[0].axes
    line, tight, loose = axes.lines
    assert (line.get_color(), [*line.get_xdata()]) == (GREY, [100, 300, 400])
    assert [[*group.get_xdata()] for group in (tight, loose)] == [[400, 300], [100, 110]]
    assert tight.get_color() != loose.get_color()
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")


def test_a_single_run_has_no_front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(pareto, "save", lambda figure, path: figures.append(figure))
    run_at(tmp_path / "one", 100, 0.1)
    draw_pareto(load_points([tmp_path / "one"]), io.BytesIO())
    draw_pareto(load_points([two_targets(tmp_path / "two")]), io.BytesIO())
    names = [[text.get_text() for text in figure.legends[0].get_texts()] for figure in figures]
    assert names[0] == ["one condition"]
    assert names[1][0] == "Pareto front"
    assert [figure.get_suptitle() for figure in figures] == [
        "retrieval, 1 condition, 1 run",
        "retrieval, 2 conditions, 4 runs",
    ]


def test_a_picture_and_a_table_are_written(tmp_path: Path) -> None:
    # A task with a strange name, and a loss without a logarithm.
    folder = run_at(tmp_path / "$x_{</b>", 100, -1.0, task="$\\frac{☃")
    picture, table = write_pareto([folder], tmp_path / "out")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "| one condition | 0.05 | 1 | 100 | 10.0× | -1 | 99.96% | 0 |" in table.read_text()
    two_targets(tmp_path / "targets")
    picture, _ = write_pareto([tmp_path / "targets"])
    assert picture == tmp_path / "targets" / "pareto" / "pareto.png"


def test_runs_that_cannot_be_compared_are_refused(tmp_path: Path) -> None:
    one = run_at(tmp_path / "one", 100, 0.1)
    other = {"compress": {"accounting": "paper"}}
    for name, options, message in (
        ("task", {"task": "lm"}, r"cannot be compared: task\.name is 'retrieval' in one"),
        ("accounting", {"changes": other}, r"compared: compress\.accounting is 'fma' in one"),
        ("unfinished", {"finished": False}, "is not finished"),
        ("nan", {"loss": float("nan")}, "has no finite held-out loss"),
    ):
        with pytest.raises(UserError, match=message):
            load_points([one, make_run(tmp_path / name, **options)])
    with pytest.raises(UserError, match="no such folder"):
        write_pareto([one, tmp_path / "nowhere"])
    assert not list(tmp_path.rglob("pareto*"))


def with_costs(path: Path, initial: dict[str, Any], final: dict[str, Any]) -> Path:
    for name, costs in (("initial.json", initial), ("summary.json", final)):
        data = json.loads((path / name).read_text())
        (path / name).write_text(json.dumps(data | {"costs": costs}))
    return path


def test_runs_of_two_accountings_are_compared_in_what_both_know(tmp_path: Path) -> None:
    timed = {"ms_of": "estimated, 1×64 tokens", "profile": "abc", "bytes_of": "weights"}
    before = {"fma": 1000.0, "bytes": 4000.0, "ms": 8.0, **timed}
    slow = {**before, "fma": 100.0, "bytes": 400.0, "ms": 4.0}
    fast = {**before, "fma": 200.0, "bytes": 500.0, "ms": 2.0}
    changes = {"changes": {"compress": {"accounting": "latency"}}}
    one = with_costs(run_at(tmp_path / "fma", 100, 0.1), before, slow)
    other = with_costs(run_at(tmp_path / "ms", 2, 0.1, **changes), before, fast)
    table = pareto_table(load_points([one, other]))
    assert table.headers[3:7] == ["ms", "compression", "fma", "bytes"]
    assert [row[3:7] for row in table.rows] == [
        ["4", "2.00×", "100", "400"],
        ["2", "4.00×", "200", "500"],
    ]
    assert "ms (estimated, 1×64 tokens)" in table.note
    assert [row[-1] for row in table.rows] == ["—", "0"]
    draw_pareto(load_points([one, other]), io.BytesIO())

    with_costs(other, before, {**fast, "profile": "another"})  # times of another table
    table = pareto_table(load_points([one, other]))
    assert table.headers[3:8] == ["FMA per token", "compression", "bytes", "ms 1", "ms 2"]
    assert [row[3:8] for row in table.rows] == [  # the most work first
        ["200", "5.00×", "500", "2", "—"],
        ["100", "10.0×", "400", "—", "4"],
    ]
    assert "ms 1 (estimated, 1×64 tokens). ms 2 (estimated, 1×64 tokens)." in table.note
    # One that knows no milliseconds has a dash, and the others keep their column.
    third = {key: value for key, value in slow.items() if key in ("fma", "bytes")}
    bare = with_costs(run_at(tmp_path / "bare", 300, 0.1, seed=2), {**third, "fma": 1000.0}, third)
    table = pareto_table(load_points([one, other, bare]))
    assert table.headers[5:8] == ["bytes", "ms 1", "ms 2"]
    with_costs(other, {}, {})
    with pytest.raises(UserError, match=r"compress\.accounting is 'fma' in one"):
        load_points([one, other])
