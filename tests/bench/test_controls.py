"""The driver of controls: valid settings, and runs after those that they start from."""

import json
import threading
from pathlib import Path

import pytest
from benchmarks import controls
from benchmarks.control_arms import ROOT, TASKS, Arm, results_of, shortened

from gaugelasso.cli.arguments import parse_changes
from gaugelasso.config import load_config
from gaugelasso.config.sections import TrainConfig
from gaugelasso.report.data import load_run
from gaugelasso.report.results_schema import check_results
from gaugelasso.runs.structures import Structure
from tests.tiny_runs import finished, read


@pytest.mark.parametrize("task", TASKS)
def test_every_arm_has_a_config_that_loads(task: str) -> None:
    work = TASKS[task](None)
    for arm in work.arms.values():
        assert (arm.source in work.arms) == (arm.command != "train")
        if arm.command == "train":
            load_config(ROOT / arm.config, parse_changes(list(arm.settings)))


def test_the_uniform_model_is_the_nearest_of_its_ladder() -> None:
    config = "configs/retrieval/paper.toml"
    narrow, few = (controls.uniform_settings(config, each, 175_000) for each in ("dims", "heads"))
    assert "model.heads=4" in narrow
    assert "model.d_k=32" in few


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that would have been run; each leaves a finished run of its seed."""
    commands: list[list[str]] = []

    def run(words: list[str]) -> str:
        commands.append(words)
        out = Path(words[words.index("--out") + 1])
        seed = int(out.name.rpartition("-")[2])
        out.parent.mkdir(parents=True, exist_ok=True)
        summary = read(finished(out.parent, out.name) / "summary.json") | {"seed": seed}
        (out / "summary.json").write_text(json.dumps(summary))
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
        "full-42", "full-43", "scratch-42", "scratch-43",
        "post-hoc-42", "post-hoc-43", "cofi-42", "cofi-43",
    ]  # fmt: skip
    pruned = made[4]
    assert pruned[:2] == ["prune", str(tmp_path / "runs/full-42")]
    assert abs(float(pruned[pruned.index("--fma") + 1]) - 175_000) < 5_000
    controls.main(words)
    assert len(made) == 8  # finished runs are not trained again
    rows = json.loads(results.read_text())["runs"]
    assert len(rows) == 8
    assert rows[0]["method"] == "cofi"
    run = tmp_path / "runs/cofi-42"
    work = read(run / "summary.json")["training_work"]
    assert (rows[0]["training_fma"], rows[0]["training_work"]) == (work["total"], work)
    assert rows[0]["before_cooldown"] == load_run(run).before_cooldown
    assert rows[0]["parameters_without_embedding"] < rows[0]["parameters_final"]
    assert rows[0]["attentions"]["initial"] == 1
    # The names of a comparison, which the tables read.
    assert {row["method"] for row in rows} == {"cofi", "from scratch", "full", "post-hoc"}
    check_results(Path("results/controls/retrieval.json"), json.loads(results.read_text()))


def test_rivals_wait_for_their_sources_alone() -> None:
    arms = ["post-hoc", "uniform-dims", "scratch"]
    jobs = controls.in_order(TASKS["retrieval"](None), arms, [42, 43])
    first = [("full", 42), ("full", 43)]
    assert jobs == [*first, *((name, seed) for name in arms for seed in (42, 43))]


def test_a_run_that_waits_for_its_source_keeps_no_other_from_starting(
    made: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, run = threading.Event(), controls.run_command

    def watched(words: list[str]) -> str:
        if "full-42" in words[words.index("--out") + 1]:
            assert begun.wait(20)
        begun.set()
        return run(words)

    monkeypatch.setattr(controls, "run_command", watched)
    words = ["retrieval", "--arms", "post-hoc", "uniform-dims", "--jobs", "2", "--device", "cpu"]
    words += ["--out", str(tmp_path / "runs"), "--results", str(tmp_path / "results.json")]
    controls.main(words)
    assert len(made) == 3


def test_a_damaged_run_does_not_cost_the_others_their_rows(
    made: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results.json"
    words = ["retrieval", "--arms", "full", "--seeds", "42-43", "--device", "cpu"]
    words += ["--out", str(tmp_path / "runs"), "--results", str(results)]
    controls.main(words)
    results.unlink()
    (tmp_path / "runs/full-42/initial.json").unlink()
    controls.main(words)
    assert [row["seed"] for row in json.loads(results.read_text())["runs"]] == [43]
    assert "full-42" in capsys.readouterr().out.partition("left out: ")[2]


def test_earlier_rows_commands_and_notes_stay(
    made: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tmp_path / "results.json"
    for number, arms in enumerate((["deep"], ["loose"], ["loose"])):
        command = f"python -m benchmarks.controls charlm --arms {arms[0]}"
        monkeypatch.setattr(controls, "environment", lambda _, words=command: {
            "command": words, "commit": "c", "hardware": "h", "date": "d"
        })  # fmt: skip
        out = ["--out", str(tmp_path / str(number)), "--results", str(results)]
        controls.main(["charlm", "--arms", *arms, *out])
        data = json.loads(results.read_text()) | {"note": "shared"}
        results.write_text(json.dumps(data))
    assert [row["method"] for row in data["runs"]] == ["deep", "loose"]
    assert ["structure" in row for row in data["runs"]] == [True, False]
    start = "python -m benchmarks.controls charlm --arms"
    assert data["command"] == f"{start} deep; {start} loose"
    controls.main(["charlm", "--arms", "deep", *out])
    assert json.loads(results.read_text())["note"] == "shared"


def test_a_found_structure_is_trained_as_long_as_the_run_that_found_it(
    made: list[list[str]], tmp_path: Path
) -> None:
    for task, file, seed in (
        ("charlm", "charlm/main.json", 42),
        ("division", "ff31/main.json", 43),
    ):
        out = tmp_path / task
        words = [task, "--arms", "scratch", "--out", str(out), "--device", "cpu"]
        controls.main([*words, "--results", str(tmp_path / f"{task}.json")])
        donor = next(run for run in results_of(file) if run["seed"] == seed)
        command = made.pop()
        given = Structure.read(Path(command[command.index("--structure") + 1]))
        assert given.data == donor["structure"]
        assert given.training_fma == donor["training_fma"]
        train = length_of(TASKS[task](None).arms["scratch"])
        assert train.steps == donor["steps"]
        assert train.steps - train.cooldown == donor["before_cooldown"]["step"]


# --- equal training work -------------------------------------------------------------------


def length_of(arm: Arm) -> TrainConfig:
    return load_config(ROOT / arm.config, parse_changes(list(arm.settings))).train


def test_a_uniform_model_with_the_training_work_of_compression() -> None:
    arm = TASKS["charlm"](None).arms["uniform-long"]
    (pressed,), (plain,) = results_of("charlm/main.json"), results_of("charlm/uniform.json")
    config = load_config(ROOT / arm.config, parse_changes(list(arm.settings)))
    assert config.target.fma == config.train.saturation == 0  # all steps are made
    work = config.train.steps * plain["fma_final"]
    assert work == pytest.approx(pressed["training_fma"], rel=1e-4)
    assert config.train.cooldown / config.train.steps == pytest.approx(30_000 / 35_250, rel=1e-4)


def test_compression_with_the_training_work_of_a_uniform_model() -> None:
    arm = TASKS["charlm"](None).arms["compression-short"]
    (before,), (plain,) = results_of("charlm/main-ln3.json"), results_of("charlm/uniform.json")
    saved = 30_000 - length_of(arm).saturation
    work = before["training_fma"] - saved * before["fma_final"]
    assert work == pytest.approx(plain["training_fma"], rel=1e-4)
    # The loss of main.toml leaves nothing for an anneal.
    with pytest.raises(ValueError, match=r"compression alone took 4\.11e\+11 FMA of 2\.68e\+11"):
        shortened("charlm/main.json", plain["training_fma"])


def test_faces_are_shifted_for_both_models_alike() -> None:
    arms = TASKS["faces"](None).arms
    for name in ("compression", "uniform"):
        still, moved = arms[name], arms[f"{name}-shifted"]
        assert (still.config, still.settings) == (moved.config, ())
        task = load_config(ROOT / moved.config, parse_changes(list(moved.settings))).task
        assert (task.shift, task.flip) == (task.patch, True)
    assert load_config(ROOT / arms["wide"].config).model.d_k == 256
    assert load_config(ROOT / arms["loose"].config).target.loss == 0.125


def test_no_run_starts_when_the_time_is_over(made: list[list[str]], tmp_path: Path) -> None:
    words = ["division", "--seconds", "0", "--out", str(tmp_path / "runs")]
    controls.main([*words, "--results", str(tmp_path / "results.json")])
    assert made == []
    with pytest.raises(SystemExit):
        controls.main([*words, "--results", str(tmp_path / "r.json"), "--arms", "magic"])
