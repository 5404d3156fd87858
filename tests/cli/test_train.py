"""The command `train`: bad input, and its output folder."""

import json
import re
import signal
from pathlib import Path

import pytest

from gaugelasso.cli import trainers
from gaugelasso.config import activations
from gaugelasso.runs import checkpoint
from tests.command import Answer, Command, assert_user_error, run_process
from tests.runs.test_checkpoint import WEIGHTS
from tests.tiny_runs import contents, newest, sign

# --- in a new process ------------------------------------------------------------------------


def test_train_prints_its_run_folder(trained: tuple[Path, Answer]) -> None:
    folder, (code, out, err) = trained
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[-1] == f"run folder: {folder}"
    assert any(line.startswith("step     40/40  cooldown") for line in lines)
    summary = json.loads((folder / "summary.json").read_text())
    assert f"({summary['compression']:.2f}x)" in out
    command = json.loads((folder / "environment.json").read_text())["command"]
    assert command.startswith("gaugelasso train ")


def test_a_diverging_run_stops_with_a_line(config: Path, tmp_path: Path) -> None:
    answer = run_process("train", config, "--out", tmp_path / "run", "--set", "compress.lr=1e30")
    assert_user_error(answer, "loss or gradient is NaN or infinite at step ")
    assert re.search(r"\(batch seed \d+\); no checkpoint yet", answer[2])
    assert not (tmp_path / "run" / "summary.json").exists()


def test_a_misspelt_key_is_one_line(config: Path, tmp_path: Path) -> None:
    answer = run_process("train", config, "--out", tmp_path / "run", "--set", "train.stpes=5")
    assert_user_error(answer, "unknown key train.stpes; did you mean 'steps'?")
    assert not (tmp_path / "run").exists()


# --- train: bad input ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "task.name=lm"], "task.name = 'lm' is unknown; choose one of: retrieval"),
        (["--set", "trian.steps=5"], "unknown key [trian]; did you mean 'train'?"),
        (["--set", "compress.lrr=5"], "did you mean 'lr'?"),
        (["--set", "train.steps"], "--set 'train.steps': write it as key=value"),
        (["--set", "steps=5"], "--set steps=5: name the section too"),
        (["--set", "train.steps=many"], "train.steps = 'many': must be a whole number"),
        (["--set", "train.steps="], "train.steps = '': must be a whole number"),
        (["--set", "compress.solver=best"], "choose one of: conservative, sign_step, fixed"),
        (["--set", "model.width=-8"], "model.width = -8"),
        (["--set", "model.width=99999999"], "model.width = 99999999"),
        (["--set", "model.d_k=3"], "[model]: d_k = 3 is odd"),
        (["--set", "train.warmup=40"], "do not fit into train.steps = 40"),
        (["--device", "tpu"], "device 'tpu' is unknown"),
        (["--device", "cuda:99"], "device 'cuda:99' is not there"),
        (["--set", "train.device=meta"], "device 'meta' is not supported"),
        (["--resume", "--overwrite"], "--resume and --overwrite exclude each other"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_refused(
    gaugelasso: Command, config: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    assert_user_error(gaugelasso("train", config, "--out", tmp_path / "run", *arguments), message)
    assert not (tmp_path / "run").exists()


def test_a_missing_or_broken_config_is_refused(gaugelasso: Command, tmp_path: Path) -> None:
    assert_user_error(gaugelasso("train", tmp_path / "none.toml"), "no such file")
    (tmp_path / "bad.toml").write_text("[task\n")
    assert_user_error(gaugelasso("train", tmp_path / "bad.toml"), "not valid TOML")
    (tmp_path / "bad.toml").write_text("[model]\nwidth = 8\n")
    message = "task.name is missing; set it in [task] to one of: retrieval"
    assert_user_error(gaugelasso("train", tmp_path / "bad.toml"), message)


def test_a_run_folder_below_a_file_is_refused(
    gaugelasso: Command, config: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    assert_user_error(gaugelasso("train", config, "--out", tmp_path / "file" / "run"), "file")


# --- train: the output folder --------------------------------------------------------


def test_an_existing_run_is_refused(gaugelasso: Command, config: Path, run: Path) -> None:
    before = contents(run)
    answer = gaugelasso("train", config, "--out", run)
    assert_user_error(
        answer, "already exists; add --resume to go on with it, --overwrite to replace it"
    )
    assert contents(run) == before


def test_bad_input_leaves_an_existing_run_unchanged(
    gaugelasso: Command, config: Path, run: Path
) -> None:
    before = contents(run)
    for change in ("train.stpes=5", "model.width=-1", "train.device=tpu"):
        assert gaugelasso("train", config, "--out", run, "--overwrite", "--set", change)[0] == 2
    assert contents(run) == before


@pytest.mark.parametrize("how", ["--resume", "--overwrite"])
def test_a_folder_that_is_not_a_run_is_left_alone(
    gaugelasso: Command, config: Path, tmp_path: Path, how: str
) -> None:
    (tmp_path / "thesis.txt").write_text("irreplaceable")
    assert_user_error(gaugelasso("train", config, "--out", tmp_path, how), "nothing was changed")
    assert contents(tmp_path) == {"thesis.txt": b"irreplaceable"}


def test_resume_repeats_the_outcome(
    gaugelasso: Command, config: Path, run: Path, trained: tuple[Path, Answer]
) -> None:
    (run / "summary.json").unlink()
    code, out, _ = gaugelasso("train", config, "--out", run, "--resume")
    assert code == 0
    assert f"run folder: {run}" in out.splitlines()
    again, before = (json.loads((f / "summary.json").read_text()) for f in (run, trained[0]))
    assert again | {"wall_s": 0} == before | {"wall_s": 0}


def test_resume_with_other_settings_is_refused(
    gaugelasso: Command, config: Path, run: Path
) -> None:
    before = contents(run)
    for change in ("model.width=6", "task.vocabulary=12", "compress.trust=1"):
        answer = gaugelasso("train", config, "--out", run, "--resume", "--set", change)
        assert_user_error(answer, change.split("=")[0])
    assert contents(run) == before


def test_resume_of_a_damaged_checkpoint_is_refused(
    gaugelasso: Command, config: Path, run: Path
) -> None:
    path = newest(run)
    WEIGHTS["a wrong shape"][0](path)
    sign(path)
    before = contents(run)
    assert_user_error(gaugelasso("train", config, "--out", run, "--resume"), "the structure needs")
    assert contents(run) == before


def test_overwrite_replaces(gaugelasso: Command, config: Path, run: Path) -> None:
    change = ("--set", "train.seed=9")
    code, _, _ = gaugelasso("train", config, "--out", run, "--overwrite", *change)
    assert code == 0
    assert json.loads((run / "summary.json").read_text())["seed"] == 9
    steps = [json.loads(row)["step"] for row in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(5, 41, 5))


def test_the_run_folder_has_a_default_name(
    gaugelasso: Command, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, _ = gaugelasso("train", config, "--set", "train.seed=7", "--set", "train.steps=20")
    assert code == 0
    assert (tmp_path / "runs" / "tiny-seed7" / "summary.json").exists()


def test_resume_prints_where_it_starts(gaugelasso: Command, config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ("train", config, "--out", run, "--resume", "--set", "train.steps=20")
    code, out, _ = gaugelasso(*options)
    assert (code, "no checkpoint to resume from; starting at step 0" in out) == (0, True)
    code, out, _ = gaugelasso(*options)
    assert (code, "resuming after step 20" in out) == (0, True)
    assert str(run) in out


def test_a_stop_before_the_first_step_is_reported(
    gaugelasso: Command, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainers, "Trainer", lambda *_, **__: signal.raise_signal(signal.SIGTERM))
    code, _, err = gaugelasso("train", config, "--out", tmp_path / "run")
    assert code == 143
    assert "stopped by SIGTERM before the first step; nothing was lost" in err


def test_a_target_below_zero_causes_a_warning(
    gaugelasso: Command, config: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is not refused, because a custom task may have negative losses."""
    options = ("--set", "target.loss=-1", "--set", "train.steps=20")
    assert gaugelasso("train", config, "--out", tmp_path / "run", *options)[0] == 2
    assert caplog.messages[0].startswith("warning: target.loss = -1 is below zero")


def test_a_batch_that_cannot_fit_costs_no_run(
    gaugelasso: Command, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activations, "memory_bytes", lambda: 10**7)
    options = ("--device", "cpu", "--set", "train.batch=100000")
    answer = gaugelasso("train", config, "--out", tmp_path / "run", *options)
    assert_user_error(answer, "train.batch = 100000 sequences of 6 positions make ")
    assert "more than the 0.01 GB of memory here can hold; at most " in answer[2]
    assert not (tmp_path / "run").exists()


def test_a_target_never_reached_is_an_error_and_the_model_is_kept(
    gaugelasso: Command, config: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    answer = gaugelasso("train", config, "--out", run, "--set", "target.loss=0.001")
    assert_user_error(answer, "target.loss = 0.001 was never reached in 40 steps")
    assert "Before and after" in answer[1]
    assert answer[1].endswith(f"run folder: {run}\n")
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["compression"], summary["target_reached_step"]) == (1.0, None)
    initial = json.loads((run / "initial.json").read_text())
    spec = json.loads(json.dumps(checkpoint.load_model(run).structure()))
    assert spec == initial["structure"]
