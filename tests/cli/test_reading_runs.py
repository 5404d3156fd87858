"""The commands `eval`, `info`, `report` and `advise`."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from gaugelasso.cli import generation
from gaugelasso.cli.evaluation import describe_figures
from gaugelasso.config import Config, load_config
from gaugelasso.errors import UserError
from gaugelasso.models import Transformer
from gaugelasso.runs.checkpoint import at_step, load_model
from gaugelasso.runs.rotation import newest_first, step_of
from tests.command import Command, assert_user_error
from tests.runs.test_checkpoint import STRUCTURES, WEIGHTS, Corruption
from tests.tiny_runs import contents, sign


def test_small_figures_keep_their_digits() -> None:
    figures = {"loss": 6.21945e-06, "accuracy": 0.0, "perplexity": 2.5}
    said = "loss 6.21945e-06  accuracy 0.000000  perplexity 2.500000  (all)"
    assert describe_figures(figures, "all") == said


def test_eval_reproduces_the_summary(gaugelasso: Command, run: Path) -> None:
    code, out, _ = gaugelasso("eval", run, "--batches", "2", "--device", "cpu")
    summary = json.loads((run / "summary.json").read_text())
    assert code == 0
    figures = f"loss {summary['loss']:.6f}  accuracy {summary['metric']['value']:.6f}"
    assert out.strip() == f"{figures}  (2 batches of 4)"


def test_eval_of_an_unfinished_run_says_so(
    gaugelasso: Command, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert gaugelasso("eval", run, "--batches", "1")[0] == 0
    assert not caplog.messages
    (run / "summary.json").unlink()
    code, out, _ = gaugelasso("eval", run, "--batches", "1")
    assert (code, out.startswith("loss ")) == (0, True)
    assert "is not finished: summary.json is missing; this is the model of its" in caplog.text


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


READERS = {
    "bench": ("bench", "--inference", "--device", "cpu"),
    "eval": ("eval",),
    "generate": ("generate",),
    "prune": ("prune", "--fma", "100"),
    "export": ("export", "--form", "native"),
}


@pytest.mark.parametrize("words", READERS.values(), ids=READERS)
def test_an_older_model_is_not_taken_for_that_of_a_finished_run(
    gaugelasso: Command, run: Path, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last checkpoint is damaged and an older one is intact: an error, and nothing written."""
    monkeypatch.chdir(run.parent)
    if words[0] == "generate":  # the run has no text
        monkeypatch.setattr(generation, "_check_text", lambda run: None)
    newest, older, *_ = newest_first(run)
    at_step(older.parent, step_of(older))  # which is intact
    weights = newest / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    before = contents(run.parent)
    answer = gaugelasso(words[0], run, *words[1:])
    assert_user_error(answer, f"{str(newest / 'model.safetensors')!r}: damaged")
    assert "going back" not in answer[2]
    assert contents(run.parent) == before
    with pytest.raises(UserError, match=r"ended at step \d+, and its final model is lost"):
        load_model(run)
    # A run that is not finished has no final model: the newest intact one, with a warning.
    (run / "summary.json").unlink()
    assert isinstance(load_model(run), Transformer)
    shutil.rmtree(newest)
    load_model(older)  # a checkpoint that is named


def test_eval_needs_a_batch_and_a_device(gaugelasso: Command, run: Path) -> None:
    assert gaugelasso("eval", run, "--batches", "0")[0] == 2
    assert_user_error(gaugelasso("eval", run, "--device", "tpu"), "device 'tpu' is unknown")
