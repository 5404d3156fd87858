"""What runs are called side by side, and which tasks are not put side by side."""

import json
from pathlib import Path

import pytest

from gaugelasso.errors import UserError
from gaugelasso.report.comparable import load_runs
from gaugelasso.report.condition_labels import condition_labels
from gaugelasso.report.data import load_run
from gaugelasso.report.pareto import load_points
from gaugelasso.report.run import Run
from tests.report.folders import make_run


def of_a_task_of_ones_own(path: Path) -> Path:
    """A run whose keys are all those of the built-in task."""
    run = make_run(path)
    config = json.loads((run / "config.json").read_text())
    config["task"] = {"module": "tasks/add.py:Addition", "length": 16}
    (run / "config.json").write_text(json.dumps(config))
    return run


def test_a_task_of_ones_own_is_not_a_built_in_one(tmp_path: Path) -> None:
    pair = make_run(tmp_path / "a"), of_a_task_of_ones_own(tmp_path / "b")
    for load in (load_runs, load_points):
        with pytest.raises(UserError, match=r"task is 'retrieval' in one and 'add.py:Addition' in"):
            load(pair)
        with pytest.raises(UserError, match=r"task is 'add.py:Addition' in one and 'retrieval' in"):
            load(pair[::-1])
    same = of_a_task_of_ones_own(tmp_path / "c"), of_a_task_of_ones_own(tmp_path / "d")
    assert len(load_runs(same)) == 2


def test_other_metrics_are_refused(tmp_path: Path) -> None:
    runs = make_run(tmp_path / "a"), make_run(tmp_path / "b", metric="error")
    with pytest.raises(UserError, match="the metric is 'accuracy' in one and 'error' in the other"):
        load_runs(runs)


_CHANGED = (("compress", "interval"), ("train", "cooldown"), ("model", "width"))


def three_settings(root: Path, names: tuple[str, str, str]) -> list[Run]:
    """Two runs of one condition and one of another, with more settings than names show."""
    many = {section: {key: 4} for section, key in _CHANGED}
    first, second, other = names
    made = [make_run(root / first), make_run(root / second, seed=1)]
    return [load_run(run) for run in (*made, make_run(root / other, changes=many))]


def test_folders_name_conditions_that_have_one_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = three_settings(tmp_path, ("ours/a", "ours/b", "theirs"))
    ours, theirs = str(tmp_path / "ours"), str(tmp_path / "theirs")
    assert condition_labels(runs) == [ours, ours, theirs]
    # Also where some paths are relative.
    monkeypatch.chdir(tmp_path)
    mixed = [load_run(Path("ours/a")), *runs[1:]]
    assert condition_labels(mixed) == [ours, ours, theirs]
    relative = [load_run(Path(name)) for name in ("ours/a", "ours/b", "theirs")]
    assert condition_labels(relative) == ["ours", "ours", "theirs"]


def test_a_folder_that_holds_both_conditions_names_neither(tmp_path: Path) -> None:
    runs = three_settings(tmp_path, ("a", "b", "c"))
    first, second, other = condition_labels(runs)
    assert first == second != other
    assert "compress.interval = 10" in first
    assert "compress.interval = 4" in other
