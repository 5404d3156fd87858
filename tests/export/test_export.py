"""The command: from a real run to a folder, the model card, and what is refused."""

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gaugelasso.errors import UserError
from gaugelasso.export import FORMS as forms
from gaugelasso.export import comparison, export, read_source, to_native
from gaugelasso.inference import InferenceModel, load
from gaugelasso.runs.checkpoint import load_model
from gaugelasso.runs.new_folder import new_folder
from gaugelasso.signals import Stopped
from tests.command import Command, assert_user_error
from tests.docs.pages import rows, under
from tests.export.sources import STEPS, card_example, tiny, write_run
from tests.tiny_runs import contents, finish


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("made") / "run", tiny())


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run"))


def test_the_command_exports_what_a_run_has_trained(gaugelasso: Command, tmp_path: Path) -> None:
    run = finish(tmp_path, compress__powers_of_two=True)
    before = contents(run)
    code, out, err = gaugelasso("export", run, "--form", "native")
    assert (code, err) == (0, "")
    folder = run / "export" / "native"
    stage, result, where = out.splitlines()
    assert stage == "comparing model.safetensors"
    assert result.startswith("native: 0.0 MiB, loaded again and compared: outputs off")
    assert where == f"folder: {folder}"
    tokens = torch.zeros(1, 6, dtype=torch.long)
    model: Any = load_model(run).eval()
    assert torch.equal(load(folder)(tokens), InferenceModel(model)(tokens))
    after = contents(run)
    assert {name: after[name] for name in before} == before
    assert all(name.startswith("export/native/") for name in after.keys() - before.keys())
    names: dict[str, Any] = {}
    exec(card_example(folder), names)
    # It has one output more than tokens, so it cannot generate.
    assert torch.equal(names["outputs"], load(folder)(tokens))


def test_the_card_describes_the_model(run: Path) -> None:
    card = export(run, "native").folder / "README.md"
    structure = {row[0]: row[1:] for row in rows(under("## Structure", card))}
    spec = read_source(run).spec
    for op in spec.operators:
        reads, *inner, writes = structure[op.name]
        assert (int(reads), int(writes)) == (len(op.reads), len(op.writes))
        if op.kind == "mlp":
            assert inner == ["", "", "", "", str(op.filters)]
        else:
            assert inner == ["4", "2", str(2 * op.keys), str(op.values), ""]
    figures = dict(rows(under("## Figures", card)))
    assert figures["loss"] == "0.5"
    assert figures["bits per byte"] == "0.75"
    assert figures["work per token before (FMA)"] == "2,000"
    assert figures["target held"] == "yes"
    cache = InferenceModel(tiny()).cache_bytes_per_token
    assert figures["cache per token (bytes, float32)"] == f"{cache:,}"
    assert dict(rows(under("## Data", card)))["path"] == "docs"
    assert dict(rows(under("## Target", card))) == {"loss": "0.6", "hold": "final"}
    assert dict(rows(under("## Origin", card)))["steps"] == str(STEPS)


def refused(gaugelasso: Command, run: Path, message: str, *options: str | Path) -> None:
    before = contents(run.parent)
    out = run.parent / "new" / "out"
    options = options or ("--form", "native")
    assert_user_error(gaugelasso("export", run, "--out", out, *options), message)
    assert contents(run.parent) == before
    assert not out.parent.exists()


def test_bad_options_are_refused(gaugelasso: Command, run: Path) -> None:
    refused(gaugelasso, run, "form 'tflite' is unknown; choose one of: onnx", "--form", "tflite")
    for options, message in [
        (("--dtype", "int8"), "dtype 'int8' is unknown; choose one of: float32, bfloat16"),
        (("--device", "tpu"), "device 'tpu' is unknown"),
    ]:
        refused(gaugelasso, run, message, "--form", "native", *options)
    refused(gaugelasso, run.parent / "none", "is not a run folder: no such folder")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_leaves_nothing_behind(
    gaugelasso: Command, run: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    seen: list[str] = []

    def interrupted(source: Any, folder: Path, *rest: Any) -> float:
        (folder / "half").write_text("half")
        seen.extend(path.name for path in folder.parent.iterdir())
        signal.raise_signal(number)
        raise AssertionError("the signal stops the export")

    handler = signal.getsignal(number)
    monkeypatch.setitem(forms, "native", interrupted)
    before = contents(run.parent)
    out = run.parent / "new" / "out"
    code, _, err = gaugelasso("export", run, "--form", "native", "--out", out)
    assert seen == [f"out.{os.getpid()}.tmp"]
    assert code == 128 + number
    assert f"before {str(out)!r} was complete; nothing was written" in err
    assert contents(run.parent) == before
    assert not out.parent.exists()
    assert signal.getsignal(number) == handler


def test_a_second_ctrl_c_does_not_interrupt_the_removal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove = shutil.rmtree

    def removal(*given: Any, **named: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        remove(*given, **named)

    monkeypatch.setattr(shutil, "rmtree", removal)

    def interrupted() -> None:
        with new_folder(tmp_path / "out") as aside:
            (aside / "half").write_text("half")
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Stopped):
        interrupted()
    assert not any(tmp_path.iterdir())


def test_an_existing_folder_is_left_alone(gaugelasso: Command, run: Path) -> None:
    for path in (run.parent / "folder", run.parent / "file"):
        path.mkdir() if path.name == "folder" else path.write_text("mine")
        answer = gaugelasso("export", run, "--form", "native", "--out", path)
        assert_user_error(answer, f"{str(path)!r} already exists; remove it, or choose another")
    (run.parent / "mine.tmp").mkdir()  # not a left-over of this command
    assert gaugelasso("export", run, "--form", "native", "--out", run.parent / "mine")[0] == 0
    assert (run.parent / "mine.tmp").exists()
    assert [*(run.parent / "folder").iterdir()] == []
    assert (run.parent / "file").read_text() == "mine"


def test_unfinished_and_damaged_runs_are_refused(gaugelasso: Command, run: Path) -> None:
    def broken(name: str, text: str | None, message: str) -> None:
        path = run / name
        kept = path.read_bytes()
        path.unlink() if text is None else path.write_text(text)
        refused(gaugelasso, run, message)
        path.write_bytes(kept)

    weights = f"checkpoints/step-{STEPS:08d}/model.safetensors"
    broken(
        "summary.json", None, "is not finished: summary.json is missing; finish it with the command"
    )
    broken("summary.json", "{", "summary.json': not a readable JSON file")
    broken(
        "summary.json", "[]", "summary.json': damaged, 'steps' is missing or is not a whole number"
    )
    broken("config.json", None, "is not a run folder: config.json is missing")
    broken(
        "config.json", '{"task": 3}', "config.json': damaged, 'task' is missing or is not a section"
    )
    broken(
        "config.json",
        '{"task": {}, "target": 5}',
        "config.json': damaged, 'target' is not a section",
    )
    broken(
        weights, "short", f"ended at step {STEPS}, and its final model is lost: '{run / weights}"
    )
    summary = json.loads((run / "summary.json").read_text())
    broken(
        "summary.json", json.dumps(summary | {"steps": 50}), "it holds no checkpoint of that step"
    )


def test_a_model_of_the_user_is_refused(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "gaugelasso.runs.checkpoint.Checkpoint.structure",
        lambda self: type("Other", (), {"model_class": "my.py:Net"})(),
    )
    with pytest.raises(UserError, match=r"its model is a 'my.py:Net'; export needs the built-in"):
        export(run, "native")


@pytest.mark.parametrize(
    ("form", "module", "extra"),
    [
        ("onnx", "onnxruntime", "onnx"),
        ("hf", "transformers", "hf"),
        ("llama", "transformers", "hf"),
    ],
)
def test_a_missing_library_is_named_with_its_extra(
    gaugelasso: Command,
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    form: str,
    module: str,
    extra: str,
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # an import of it fails
    refused(gaugelasso, run, f"pip install 'gaugelasso[{extra}]'", "--form", form)


def test_what_computes_something_else_is_not_kept(
    gaugelasso: Command, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoiled(folder: Path) -> Any:
        served = load(folder)
        return lambda inputs: served(inputs) * 1.01

    monkeypatch.setattr(to_native, "load", spoiled)
    refused(gaugelasso, run, "of their spread, more than 0.0001, so nothing was written")
    monkeypatch.setattr(to_native, "load", lambda folder: lambda x: load(folder)(x) * torch.nan)
    refused(gaugelasso, run, "its outputs are off by nan")


def test_a_cache_that_forgets_is_noticed(run: Path) -> None:
    source = read_source(run)
    served = source.served()

    def forgetful(tokens: Any, mask: Any, positions: Any, past: Any) -> Any:
        past = served.empty_past(len(tokens))
        return served.forward_past(tokens, positions, mask[:, -tokens.shape[1] :].bool(), past)

    with pytest.raises(UserError, match="of their spread, more than"):
        comparison.Comparison(source, torch.float32).check("cache", step=forgetful)


def test_a_full_disk_leaves_nothing(
    gaugelasso: Command, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gaugelasso.inference.stored.write_new", full)
    refused(gaugelasso, run, "cannot be written: No space left on device")


@pytest.mark.parametrize(("share", "passes"), [(0.5, True), (2.0, False)])
def test_rounding_is_measured_where_a_model_amplifies_it(
    made: Path, monkeypatch: pytest.MonkeyPatch, share: float, passes: bool
) -> None:
    """Outputs of float32 may be off by more than 1e-4, if float64 says that this is rounding."""
    compared = comparison.Comparison(read_source(made), torch.float32)
    assert 0 < compared._rounding_of_float32() < 1e-5
    monkeypatch.setattr(compared, "_rounding_of_float32", lambda: 1e-3)
    off = share * comparison.ROUNDING * 1e-3 * compared.spread
    if passes:
        assert compared.check("it", whole=lambda inputs: compared.exact(inputs) + off) > 1e-4
    else:
        with pytest.raises(UserError, match=r"it: its outputs are off by 0\.016 .* than 0\.008"):
            compared.check("it", whole=lambda inputs: compared.exact(inputs) + off)
