"""The driver of controls: valid settings, and runs after those that they start from."""

import contextlib
import json
import math
import sys
import threading
import time
from pathlib import Path

import pytest
from benchmarks import controls, kept_rows
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

    def run(words: list[str], _: float) -> str:
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
    work = TASKS["retrieval"](None)
    jobs = controls.in_order(work, arms, [42, 43])
    first = [("full", 42), ("full", 43)]
    assert jobs == [*first, *((name, seed) for name in arms for seed in (42, 43))]
    # Of those that the results have, only the source of another is made.
    known = {("full", 42), ("full", 43), ("post-hoc", 43), ("uniform", 42), ("from scratch", 43)}
    jobs = controls.in_order(work, arms, [42, 43], known)
    assert jobs == [("full", 42), ("post-hoc", 42), ("uniform-dims", 43), ("scratch", 42)]


def test_a_run_that_waits_for_its_source_keeps_no_other_from_starting(
    made: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, run = threading.Event(), controls.run_command

    def watched(words: list[str], end: float) -> str:
        if "full-42" in words[words.index("--out") + 1]:
            assert begun.wait(20)
        begun.set()
        return run(words, end)

    monkeypatch.setattr(controls, "run_command", watched)
    words = ["retrieval", "--arms", "post-hoc", "uniform-dims", "--jobs", "2", "--device", "cpu"]
    words += ["--out", str(tmp_path / "runs"), "--results", str(tmp_path / "results.json")]
    controls.main(words)
    assert len(made) == 3


def test_a_run_whose_row_is_there_is_not_trained_on_another_machine(
    made: list[list[str]], tmp_path: Path
) -> None:
    results = tmp_path / "results.json"
    words = ["retrieval", "--device", "cpu", "--results", str(results)]
    out = ["--out", str(tmp_path / "one")]
    controls.main([*words, *out, "--arms", "full", "scratch", "--seeds", "42"])
    before = json.loads(results.read_text())["runs"]
    row = next(row for row in before if row["method"] == "full")
    row |= {"wall_s": 1.5, "commit": "earlier"}  # as of another machine
    results.write_text(json.dumps(json.loads(results.read_text()) | {"runs": before}))
    made.clear()
    out = ["--out", str(tmp_path / "bare")]
    arms = ["--arms", "full", "scratch", "post-hoc", "--seeds", "42"]
    controls.main([*words, *out, *arms])
    names = [Path(each[each.index("--out") + 1]).name for each in made]
    assert names == ["full-42", "post-hoc-42"]  # the full model is pruned, so it has to be there
    rows = json.loads(results.read_text())["runs"]
    assert [row["method"] for row in rows] == ["from scratch", "full", "post-hoc"]
    assert rows[1] == row
    controls.main([*words, "--out", str(tmp_path / "again"), "--again", *arms])
    assert len(made) == 5
    assert json.loads(results.read_text())["runs"][1] != row


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


def test_a_run_without_a_finite_loss_keeps_no_other_from_its_row(
    made: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = controls.run_command

    def spoiled(words: list[str], end: float) -> str:
        path = Path(words[words.index("--out") + 1]) / "summary.json"
        message = run(words, end)
        if "42" in path.parent.name:
            path.write_text(json.dumps(read(path) | {"loss": None}))
        return message

    monkeypatch.setattr(controls, "run_command", spoiled)
    results = tmp_path / "results.json"
    words = ["retrieval", "--arms", "full", "--seeds", "42-43", "--device", "cpu"]
    controls.main([*words, "--out", str(tmp_path / "runs"), "--results", str(results)])
    assert [row["loss"] is None for row in read(results)["runs"]] == [True, False]


def test_a_file_and_a_folder_have_the_runs_of_one_task_and_one_work(
    made: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results, out = tmp_path / "results.json", tmp_path / "runs"
    words = ["retrieval", "--arms", "post-hoc", "--out", str(out), "--results", str(results)]
    controls.main(words)
    found = read(results)
    assert (found["task"], found["fma_asked"]) == ("retrieval", 174511)
    # The commit is that of the run, not of the call that writes the row.
    trained = read(out / "full-42/environment.json")["commit"]
    assert {row["commit"] for row in found["runs"]} == {trained}
    elsewhere = str(tmp_path / "other.json"), str(tmp_path / "others")
    for other, which, said in (
        (["division", *words[1:]], results, "task is 'retrieval', and now 'ff31'"),
        ([*words, "--fma", "90000", "--again"], results, "fma_asked is 174511, and now 90000"),
        ([*words, "--fma", "90000", "--results", elsewhere[0]], out, "fma_asked is 174511"),
        ([*words, "--fma", "90000", "--out", elsewhere[1]], results, "fma_asked is 174511"),
    ):
        with pytest.raises(SystemExit):
            controls.main(other)
        told = capsys.readouterr().err
        assert said in told
        assert str(which) in told
    assert read(results) == found
    assert len(made) == 2


def test_earlier_rows_commands_and_notes_stay(
    made: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tmp_path / "results.json"
    for number, arms in enumerate((["deep"], ["loose"], ["loose"])):
        command = f"python -m benchmarks.controls charlm --arms {arms[0]}"
        monkeypatch.setattr(kept_rows, "environment", lambda _, words=command: {
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


def test_runs_on_a_gpu_share_it(
    made: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[bool]()

    def shared(wanted: bool) -> contextlib.AbstractContextManager[None]:
        asked.append(wanted)
        return contextlib.nullcontext()

    monkeypatch.setattr(controls, "shared_gpu", shared)
    monkeypatch.setattr(controls, "choose_device", lambda name: name)
    monkeypatch.setattr(kept_rows, "environment", lambda _: {
        "command": "c", "commit": "c", "hardware": "h", "date": "d"
    })  # fmt: skip
    words = ["retrieval", "--arms", "full", "--seeds", "42-43", "--out", str(tmp_path / "runs")]
    words += ["--results", str(tmp_path / "results.json")]
    for device, jobs in (("cuda", "2"), ("cuda", "1"), ("cpu", "2")):
        controls.main([*words, "--device", device, "--jobs", jobs])
    assert asked == [True, False, False]


def test_a_run_is_told_to_stop_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import sys, time; print('x' * 2000 + 'begun', file=sys.stderr); time.sleep(600)"
    monkeypatch.setattr(controls, "COMMAND", (sys.executable, "-c", program))
    begun = time.monotonic()
    controls.run_command(["train"], begun + 0.2)
    assert time.monotonic() - begun < 60
    monkeypatch.setattr(controls, "COMMAND", (sys.executable, "-c", program.replace("600", "0")))
    messages = controls.run_command(["train"], math.inf)
    assert messages.endswith("xbegun\n")
    assert len(messages) == 1500


def test_no_run_starts_when_the_time_is_over(made: list[list[str]], tmp_path: Path) -> None:
    words = ["division", "--seconds", "0", "--out", str(tmp_path / "runs")]
    controls.main([*words, "--results", str(tmp_path / "results.json")])
    assert made == []
    with pytest.raises(SystemExit):
        controls.main([*words, "--results", str(tmp_path / "r.json"), "--arms", "magic"])


def test_rivals_of_the_language_model_have_equal_steps() -> None:
    arms = TASKS["charlm"](None).arms

    def option(name: str, key: str) -> float:
        options = arms[name].options
        return float(options[options.index(f"--{key}") + 1]) if f"--{key}" in options else 0.0

    rivals = ("post-hoc", "torch-pruning-magnitude", "torch-pruning-group-norm")
    assert [option(name, "sparse") + option(name, "finetune") for name in rivals] == [36_000] * 3
    for key in ("warmup", "prune", "finetune"):
        assert option("cofi", key) == option("cofi-parameters", key)
    # The paper's has 48.0M of 5.7M, ours 48.0M of what its compressed run has.
    assert option("cofi-parameters", "parameters") == 6_409_466


def test_the_loose_division_is_the_paper_s_config() -> None:
    arm = TASKS["division"](None).arms["compression-loose"]
    config = load_config(ROOT / arm.config)
    assert (config.target.loss, config.train.steps, arm.settings) == (0.01, 40_000, ())
