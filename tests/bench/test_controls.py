"""The driver of controls: valid settings, and runs after those that they start from."""

import json
from pathlib import Path

import pytest
from benchmarks import controls

from gaugelasso.cli.arguments import parse_changes
from gaugelasso.config import load_config

SUMMARY = {
    "fma_initial": 9.0, "fma_final": 3.0, "loss": 0.5, "metric": {"name": "accuracy", "value": 0.9},
    "held": True, "steps": 7, "wall_s": 1.0, "accounting": "paper", "training_fma": 20.0,
    "training_work": {"own": 20.0, "before": 30.0, "total": 50.0},
}  # fmt: skip


@pytest.mark.parametrize("task", controls.TASKS)
def test_every_arm_has_a_config_that_loads(task: str) -> None:
    work = controls.TASKS[task](None)
    for arm in work.arms.values():
        assert (arm.source in work.arms) == (arm.command != "train")
        if arm.command == "train":
            load_config(controls.ROOT / arm.config, parse_changes(list(arm.settings)))


def test_the_uniform_model_is_the_nearest_of_its_ladder() -> None:
    config = "configs/retrieval/paper.toml"
    narrow, few = (controls.uniform_settings(config, each, 175_000) for each in ("dims", "heads"))
    assert "model.heads=4" in narrow
    assert "model.d_k=32" in few


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that would have been run; each leaves a summary."""
    commands: list[list[str]] = []

    def run(words: list[str]) -> str:
        commands.append(words)
        out = Path(words[words.index("--out") + 1])
        folder = out / f"seed{words[words.index('--seeds') + 1]}" if "--seeds" in words else out
        folder.mkdir(parents=True)
        (folder / "summary.json").write_text(json.dumps(SUMMARY))
        return ""

    monkeypatch.setattr(controls, "run_command", run)
    return commands


def test_runs_come_after_their_sources_and_once(made: list[list[str]], tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    words = ["retrieval", "--arms", "scratch", "post-hoc", "cofi", "--seeds", "42-43"]
    words += ["--out", str(tmp_path / "runs"), "--results", str(results), "--device", "cpu"]
    controls.main(words)
    names = [Path(each[each.index("--out") + 1]).name for each in made]
    assert names == [
        "compression-45", "scratch-42", "scratch-43", "full-42", "post-hoc-42",
        "full-43", "post-hoc-43", "cofi-42", "cofi-43",
    ]  # fmt: skip
    pruned = made[4]
    assert pruned[:2] == ["prune", str(tmp_path / "runs/full-42")]
    assert abs(float(pruned[pruned.index("--fma") + 1]) - 175_000) < 5_000
    controls.main(words)
    assert len(made) == 9  # finished runs are not trained again
    rows = json.loads(results.read_text())["runs"]
    assert len(rows) == 9
    assert rows[0]["method"] == "cofi"
    assert (rows[0]["training_fma"], rows[0]["own_training_fma"]) == (50.0, 20.0)


def test_no_run_starts_when_the_time_is_over(made: list[list[str]], tmp_path: Path) -> None:
    words = ["division", "--seconds", "0", "--out", str(tmp_path / "runs")]
    controls.main([*words, "--results", str(tmp_path / "results.json")])
    assert made == []
    with pytest.raises(SystemExit):
        controls.main([*words, "--results", str(tmp_path / "r.json"), "--arms", "magic"])
