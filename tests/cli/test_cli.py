"""The command line: its output, its files, and its error messages."""

import json
import re
import shutil
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from gaugelasso import cli
from gaugelasso.cli import trainers
from gaugelasso.config import Config, activations, load_config
from gaugelasso.report import timing
from gaugelasso.runs import checkpoint
from gaugelasso.version import __version__
from tests import warm
from tests.command import Answer, Command, assert_user_error, run_process
from tests.runs.test_checkpoint import STRUCTURES, WEIGHTS, Corruption
from tests.tiny import write_tiny
from tests.tiny_runs import contents, newest, sign


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny config, changed so that an operator is left at the end."""
    path = write_tiny(tmp_path_factory.mktemp("cli"))
    path.write_text(path.read_text().replace("[compress]", "[compress]\npowers_of_two = true"))
    return path


@pytest.fixture(scope="module")
def trained(config: Path) -> tuple[Path, Answer]:
    """A run made by the command itself, and the command's output."""
    out = config.parent / "a folder with [brackets]"
    return out, run_process("train", config, "--out", out)


@pytest.fixture
def run(trained: tuple[Path, Answer], tmp_path: Path) -> Path:
    """A copy of that run."""
    return Path(shutil.copytree(trained[0], tmp_path / "run"))


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


def test_brackets_in_an_error_are_not_markup(gaugelasso: Command) -> None:
    for name in ("[bold]", "[red]x[", "[/]"):
        assert_user_error(gaugelasso("train", f"{name}.toml"), f"{name}.toml")


@pytest.mark.parametrize(
    "arguments",
    [["train"], ["fly"], ["train", "x.toml", "--fast"], ["eval"], ["report"], ["info"], ["advise"]],
    ids=" ".join,
)
def test_invalid_arguments_are_a_usage_error(gaugelasso: Command, arguments: list[str]) -> None:
    code, _, err = gaugelasso(*arguments)
    assert code == 2
    assert "Usage" in err


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


def test_a_launcher_receives_a_user_error(
    gaugelasso: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it torchrun prints only its own traceback."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    assert_user_error(gaugelasso("train", tmp_path / "none.toml"), "no such file")
    failure = ProcessFailure(0, 1, 2, str(tmp_path / "error.json"))
    message = ChildFailedError("gaugelasso", {0: failure}).format_msg()
    assert f"config {str(tmp_path / 'none.toml')!r}: no such file" in message


def test_a_launcher_receives_an_unexpected_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(cli, "app", fail)
    monkeypatch.setattr(cli, "set_up_process", lambda: None)
    for path in (tmp_path / "error.json", tmp_path / "no" / "such" / "folder.json"):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
        with pytest.raises(RuntimeError, match="a bug"):
            cli.main()
    failure = ProcessFailure(0, 1, 1, str(tmp_path / "error.json"))
    message = ChildFailedError("gaugelasso", {0: failure}).format_msg()
    assert "RuntimeError: a bug" in message
    assert [path.name for path in tmp_path.iterdir()] == ["error.json"]


@pytest.mark.parametrize(
    ("error", "needed"),
    [
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 4096000000 "
                      "bytes."), " (4.1 GB more were needed)"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has"),
         " (20.00 GiB more were needed)"),
        (MemoryError(), ""),
        (RuntimeError("std::bad_alloc"), ""),
    ],
    ids=repr,
)  # fmt: skip
def test_a_lack_of_memory_is_one_line(
    gaugelasso: Command, monkeypatch: pytest.MonkeyPatch, error: Exception, needed: str
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(cli, "app", fail)
    assert_user_error(gaugelasso("train"), f"out of memory{needed}: give a smaller batch")


def test_a_batch_that_cannot_fit_costs_no_run(
    gaugelasso: Command, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activations, "memory_bytes", lambda: 10**7)
    options = ("--device", "cpu", "--set", "train.batch=100000")
    answer = gaugelasso("train", config, "--out", tmp_path / "run", *options)
    assert_user_error(answer, "train.batch = 100000 sequences of 6 positions make ")
    assert "more than the 0.01 GB of memory here can hold; at most " in answer[2]
    assert not (tmp_path / "run").exists()


def test_a_crash_prints_the_stack() -> None:
    crash = "import os; from gaugelasso import cli; cli.app = os.abort; cli.main()"
    crashed = subprocess.run([warm.python(), "-c", crash], capture_output=True, text=True)
    assert crashed.returncode == -signal.SIGABRT
    assert "Fatal Python error: Aborted" in crashed.stderr
    assert 'cli/__init__.py", line ' in crashed.stderr


def test_a_target_never_reached_is_an_error_and_the_model_is_kept(
    gaugelasso: Command, config: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    answer = gaugelasso("train", config, "--out", run, "--set", "target.loss=0.001")
    assert_user_error(answer, "target.loss = 0.001 was never reached in 40 steps")
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["compression"], summary["target_reached_step"]) == (1.0, None)
    initial = json.loads((run / "initial.json").read_text())
    spec = json.loads(json.dumps(checkpoint.load_model(run).structure()))
    assert spec == initial["structure"]


# --- eval, info, report --------------------------------------------------------------


def test_eval_reproduces_the_summary(gaugelasso: Command, run: Path) -> None:
    code, out, _ = gaugelasso("eval", run, "--batches", "2", "--device", "cpu")
    summary = json.loads((run / "summary.json").read_text())
    assert code == 0
    figures = f"loss {summary['loss']:.6f}  accuracy {summary['metric']['value']:.6f}"
    assert out.strip() == f"{figures}  (2 batches of 4)"


def test_info_shows_the_structure(gaugelasso: Command, run: Path) -> None:
    code, out, _ = gaugelasso("info", run)
    assert code == 0
    summary = json.loads((run / "summary.json").read_text())
    for part in ("d_ai", "d_mo", f"{summary['fma_final']:,.0f}"):
        assert part in out


@pytest.mark.usefixtures("undrawn")
def test_report_writes_its_files(gaugelasso: Command, run: Path) -> None:
    code, out, _ = gaugelasso("report", run)
    assert code == 0
    assert f"report: {run / 'report' / 'index.html'}" in out.splitlines()
    assert (run / "report" / "index.html").exists()


@pytest.mark.parametrize(
    "command", ["eval", "info", "report", "advise", "pareto", "show", "generate"]
)
def test_a_path_that_is_not_a_run_is_named(
    gaugelasso: Command, tmp_path: Path, command: str
) -> None:
    (tmp_path / "thesis.txt").write_text("irreplaceable")
    (tmp_path / "file").write_text("")
    for name in ("", "nowhere", "file"):
        assert_user_error(gaugelasso(command, tmp_path / name), str(tmp_path / name))
    assert contents(tmp_path) == {"thesis.txt": b"irreplaceable", "file": b""}


def test_advise_writes_a_config_that_loads(gaugelasso: Command, run: Path) -> None:
    code, out, _ = gaugelasso("advise", run)
    assert code == 0
    assert out.splitlines()[-1] == f"next config: {run / 'next.toml'}"
    before = Config.from_dict(json.loads((run / "config.json").read_text()))
    after = load_config(run / "next.toml")
    assert replace(after, model=before.model) == before


def test_advise_replaces_a_file_only_with_overwrite(
    gaugelasso: Command, run: Path, tmp_path: Path
) -> None:
    out = tmp_path / "new" / "next.toml"
    assert gaugelasso("advise", run, "--out", out)[0] == 0
    text = out.read_text()
    out.write_text("mine")
    assert_user_error(gaugelasso("advise", run, "--out", out), "already exists; add --overwrite")
    assert out.read_text() == "mine"
    assert gaugelasso("advise", run, "--out", out, "--overwrite")[0] == 0
    assert out.read_text() == text
    answer = gaugelasso("advise", run, "--out", out.parent, "--overwrite")
    assert_user_error(answer, "cannot be written")
    assert {path.name for path in tmp_path.iterdir()} == {"run", "new"}


def test_advise_refuses_a_config_that_cannot_be_trained(gaugelasso: Command, run: Path) -> None:
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"task": {"name": "lm"}}))
    assert_user_error(gaugelasso("advise", run), "task.name = 'lm' is unknown")
    assert not (run / "next.toml").exists()


@pytest.mark.parametrize("text", ["{", "[]", "3", '{"task": 3}', '{"tsk": {}}'])
def test_eval_of_a_damaged_config_is_refused(gaugelasso: Command, run: Path, text: str) -> None:
    (run / "config.json").write_text(text)
    assert_user_error(gaugelasso("eval", run), "")


def test_eval_without_a_checkpoint_is_refused(gaugelasso: Command, run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    assert_user_error(gaugelasso("eval", run), "holds no checkpoint")


@pytest.mark.parametrize(
    "corrupt",
    [corrupt for corrupt, _ in (*WEIGHTS.values(), *STRUCTURES.values())],
    ids=[*(f"weights: {name}" for name in WEIGHTS), *(f"structure: {name}" for name in STRUCTURES)],
)
def test_eval_of_a_damaged_checkpoint_is_refused(
    gaugelasso: Command, run: Path, corrupt: Corruption
) -> None:
    for path in (run / "checkpoints").iterdir():
        corrupt(path)
        sign(path)
    before = contents(run)
    assert_user_error(gaugelasso("eval", run), str(run / "checkpoints"))
    assert contents(run) == before


def test_eval_needs_a_batch_and_a_device(gaugelasso: Command, run: Path) -> None:
    assert gaugelasso("eval", run, "--batches", "0")[0] == 2
    assert_user_error(gaugelasso("eval", run, "--device", "tpu"), "device 'tpu' is unknown")


# --- help ----------------------------------------------------------------------------


def test_the_version_is_printed(gaugelasso: Command) -> None:
    code, out, _ = gaugelasso("--version")
    assert (code, out.strip()) == (0, __version__)


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_help_with_an_example(gaugelasso: Command, command: str) -> None:
    code, out, _ = gaugelasso(command, "--help")
    assert code == 0
    assert f"Example: gaugelasso {command} " in out


def test_the_help_of_the_program_lists_the_commands_and_an_example(gaugelasso: Command) -> None:
    code, out, _ = gaugelasso("--help")
    assert code == 0
    assert "Example: gaugelasso train " in out
    assert all(f" {command} " in out for command in cli.COMMANDS)


# --- bench ---------------------------------------------------------------------------


def test_bench_times_a_step_and_a_run(
    gaugelasso: Command, config: Path, run: Path, tmp_path: Path
) -> None:
    file = tmp_path / "bench.json"
    for what in ((config, "--work", "tiny"), (run, "--inference", "--work", "mine")):
        options = ("--repeats", "3", "--device", "cpu", "--out", file)
        code, out, err = gaugelasso("bench", *what, *options)
        assert code == 0, err
        assert f"benchmark file: {file}" in out
    kept = json.loads(file.read_text())
    assert [row["work"] for row in kept["rows"]] == ["tiny"]
    models = ["ancestor", "uniform", "compressed"]
    names = [f"mine-{model}{form}-cpu" for model in models for form in ("", "-served")]
    assert [row["work"] for row in kept["inference"]] == names
    sizes = ("--batch", "2", "--length", "5", "--decode", "--work", "mine")
    code, out, err = gaugelasso("bench", run, "--inference", *sizes, *options)
    assert code == 0, err
    assert "one more token of 2 sequences after 4" in out
    added = [row["work"] for row in json.loads(file.read_text())["inference"][len(names) :]]
    assert added == [f"mine-2x5-decode-{model}-served-cpu" for model in models]


def test_bench_rounds_widths_up(
    gaugelasso: Command, config: Path, run: Path, tmp_path: Path
) -> None:
    file = tmp_path / "bench.json"
    options = ("--multiple", "3", "--repeats", "3", "--device", "cpu", "--out", file)
    for structure in ((), ("--structure", run)):
        code, _, err = gaugelasso("bench", config, *structure, *options)
        assert code == 0, err
    rows = json.loads(file.read_text())["rows"]
    assert [row["work"] for row in rows] == ["tiny-by3", "tiny-structure-by3"]
    assert all(row["multiple"] == 3 and row["fma"] > row["fma_exact"] for row in rows)


@pytest.mark.parametrize(("limit", "warns"), [(-1.0, True), (1e9, False)])
def test_bench_warns_of_a_busy_machine(
    gaugelasso: Command,
    config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    limit: float,
    warns: bool,
) -> None:
    monkeypatch.setattr(timing, "BUSY", limit)
    options = ("--repeats", "3", "--device", "cpu", "--out", tmp_path / "bench.json")
    code, out, err = gaugelasso("bench", config, *options)
    assert code == 0, err
    warnings = [line for line in out.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == warns
    assert all("repetitions disagree" in line and "Run it again" in line for line in warnings)


def test_inference_needs_a_run_folder(gaugelasso: Command, config: Path) -> None:
    answer = gaugelasso("bench", config, "--inference")
    assert_user_error(answer, "--inference needs a run folder")


@pytest.mark.parametrize("option", [("--batch", "2"), ("--length", "5"), ("--decode",)])
def test_sizes_are_for_inference(
    gaugelasso: Command, config: Path, option: tuple[str, ...]
) -> None:
    answer = gaugelasso("bench", config, *option)
    assert_user_error(answer, "--batch, --length and --decode are for --inference")


def test_a_run_folder_needs_inference(gaugelasso: Command, run: Path) -> None:
    assert_user_error(gaugelasso("bench", run), f"{str(run)!r} is a folder: add --inference")


def test_inference_needs_a_finished_run(gaugelasso: Command, run: Path, tmp_path: Path) -> None:
    (run / "summary.json").unlink()
    out = tmp_path / "bench.json"
    answer = gaugelasso("bench", run, "--inference", "--out", out)
    assert_user_error(answer, f"{str(run)!r} is not finished: summary.json is missing; finish it")
    assert not out.exists()


def test_a_multiple_is_at_least_one(gaugelasso: Command, config: Path) -> None:
    code, _, err = gaugelasso("bench", config, "--multiple", "0")
    assert code == 2
    assert "--multiple" in err


@pytest.mark.parametrize(
    "option", [("--set", "train.seed=1"), ("--structure", "x.json"), ("--multiple", "8")]
)
def test_inference_refuses_options_it_does_not_use(
    gaugelasso: Command, run: Path, option: tuple[str, str]
) -> None:
    answer = gaugelasso("bench", run, "--inference", *option)
    assert_user_error(answer, "--inference takes structure and settings from RUN")
