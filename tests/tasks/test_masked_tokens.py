"""Masked tokens: what is hidden and counted, and a run of an imported encoder."""

import contextlib
import io
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from gaugelasso.config import load_config
from gaugelasso.errors import UserError
from gaugelasso.files.tokenizer import load_tokenizer
from gaugelasso.importing import import_model, is_causal, open_source
from gaugelasso.importing.folder import write_imported
from gaugelasso.kernels import NO_TARGET
from gaugelasso.runs.checkpoint import load_model
from gaugelasso.runs.folder import Existing
from gaugelasso.tasks import SELECTION, TEST, TRAINING, Draw, MaskedTokens
from gaugelasso.training.trainer import Trainer
from tests.command import Command, assert_user_error
from tests.importing.bases import write_encoder
from tests.importing.sources import gpt2, roberta
from tests.tasks.tokenizers import WORDS, byte_level, save, word_piece
from tests.tiny_runs import assert_same_run, outcome, read, stop_at

pytestmark = pytest.mark.usefixtures("own_cache")
TEXT = WORDS * 12
UNKNOWN, FIRST, LAST, MASK = 1, 2, 3, 4


@pytest.fixture
def task(tmp_path: Path) -> MaskedTokens:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(TEXT)
    tokenizer = save(word_piece(), tmp_path / "tokenizer.json")
    paths = {"path": str(tmp_path / "a.txt"), "valid": str(tmp_path / "b.txt")}
    return MaskedTokens(**paths, tokenizer=str(tokenizer), length=32, masked=0.3)


def array_task(tmp_path: Path, **settings: Any) -> MaskedTokens:
    """Of tokens 0 to 49; the mask token 50 is not among them."""
    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(0, 50, 40_000))
    given = {"path": str(tmp_path / "ids.npy"), "split": 0.1, "vocabulary": 60, "mask": 50}
    return MaskedTokens(**(given | {"length": 40} | settings))


# --- what is hidden ------------------------------------------------------------------------


def test_a_window_begins_and_ends_with_special_tokens(task: MaskedTokens) -> None:
    whole = task.reader.encode([TEXT])[0]
    inputs, targets = task.batch(2, Draw(0, 0, SELECTION), "cpu")
    assert inputs.shape == targets.shape == (2, 32)
    assert (inputs[:, 0] == FIRST).all()
    assert (inputs[:, -1] == LAST).all()
    counted = targets != NO_TARGET
    assert not counted[:, [0, -1]].any()
    assert counted.sum(1).tolist() == [9, 9]  # 0.3 of 30
    # Where nothing is chosen stands the text, and the targets are the text that is hidden.
    shown = torch.where(counted, targets, inputs)[:, 1:-1]
    assert shown.flatten().tolist() == whole[:60].tolist()
    # A token that the tokenizer does not know is chosen last.
    assert UNKNOWN not in targets[counted]


def test_of_the_chosen_most_are_masked_some_changed_and_some_kept(tmp_path: Path) -> None:
    inputs, targets = array_task(tmp_path).batch(2000, Draw(0), "cpu")
    chosen = targets != NO_TARGET
    assert (chosen.sum(1) == 6).all()
    found, kept = inputs[chosen], targets[chosen]
    masked = (found == 50).double().mean()
    same = (found == kept).double().mean()
    # A random token is the mask token, or the hidden one, once in sixty times.
    assert float(masked) == pytest.approx(0.8 + 0.1 / 60, abs=0.015)
    assert float(same) == pytest.approx(0.1 + 0.1 / 60, abs=0.012)
    assert found.max() > 50  # any token of the vocabulary
    # Each place is chosen equally often.
    assert chosen.double().mean(0).sub(0.15).abs().max() < 0.04


def test_choices_follow_from_the_draw(tmp_path: Path) -> None:
    task = array_task(tmp_path)

    def hidden(draw: Draw, size: int = 4) -> Tensor:
        return task.batch(size, draw, "cpu")[1] != NO_TARGET

    assert torch.equal(hidden(Draw(3, 7)), hidden(Draw(3, 7)))
    assert not torch.equal(hidden(Draw(3, 7)), hidden(Draw(4, 7)))
    assert not torch.equal(hidden(Draw(3, 7)), hidden(Draw(3, 8)))
    # Held-out windows hide the same tokens in all runs, and in batches of any size.
    held_out = hidden(Draw(0, 1, SELECTION))
    assert torch.equal(hidden(Draw(9, 1, SELECTION)), held_out)
    assert torch.equal(hidden(Draw(0, 0, SELECTION), 8)[4:], held_out)
    assert not torch.equal(held_out[0], held_out[1])


# --- figures -------------------------------------------------------------------------------


def test_figures_are_those_of_the_chosen_tokens(tmp_path: Path) -> None:
    task = array_task(tmp_path)

    def predict(inputs: Tensor) -> Tensor:
        """Likes the token that stands there: right where a chosen one was kept."""
        return 3.0 * F.one_hot(inputs, 60).float()

    assert len(task.part(TEST)) % 40 == 0
    number = task.whole_windows(TEST)
    inputs, targets = task.batch(number, Draw(0, 0, TEST), "cpu")
    chosen = targets != NO_TARGET
    loss = float(F.cross_entropy(predict(inputs)[chosen], targets[chosen]))
    figures = task.whole_figures(predict, 3, "cpu")
    assert figures["loss"] == pytest.approx(loss, rel=1e-5)
    assert figures["bits per masked token"] == pytest.approx(loss / math.log(2), rel=1e-5)
    assert figures["perplexity per masked token"] == pytest.approx(math.exp(loss), rel=1e-5)
    right = (inputs[chosen] == targets[chosen]).double().mean()
    assert figures["accuracy"] == pytest.approx(float(right), rel=1e-6)
    assert float(task.loss(predict(inputs), targets)) == pytest.approx(loss, rel=1e-5)
    metric = float(task.metric(predict(inputs), targets))
    assert metric == pytest.approx(figures["bits per masked token"], rel=1e-5)
    # Each window once, however many batches there are.
    draws = [Draw(0, index, TEST) for index in range(100)]
    assert task.final_figures(predict, 3, draws, "cpu") == figures
    some = task.final_figures(predict, 2, draws[:1], "cpu")["loss"]
    inputs, targets = task.batch(2, draws[0], "cpu")
    assert some == pytest.approx(float(task.loss(predict(inputs), targets)), rel=1e-5)


def test_a_text_shorter_than_a_window_is_measured(tmp_path: Path) -> None:
    task = array_task(tmp_path, length=512)
    sizes: list[tuple[int, ...]] = []

    def predict(inputs: Tensor) -> Tensor:
        sizes.append(tuple(inputs.shape))
        return torch.zeros(*inputs.shape, 60)

    figures = task.text_figures(predict, "cpu", most=100)
    assert sizes == [(1, 100)]
    assert figures["loss"] == pytest.approx(math.log(60), rel=1e-5)


def test_of_a_text_every_token_is_read_once(tmp_path: Path) -> None:
    task = array_task(tmp_path, length=64, masked=0.01)
    text = torch.from_numpy(np.load(tmp_path / "ids.npy"))
    read: list[Tensor] = []

    def predict(inputs: Tensor) -> Tensor:
        read.append(inputs)
        return torch.zeros(*inputs.shape, 60)

    for most in (1000, 40 * 64, 0):
        read.clear()
        task.text_figures(predict, "cpu", most)
        seen = torch.cat([inputs.flatten() for inputs in read])
        assert len(seen) == (most or len(text))
        # But for the one token that is hidden in each window.
        assert (seen != text[: len(seen)]).sum() <= math.ceil(len(seen) / 64)
    # Also of the held-out halves; that for selection has whole windows.
    for stream, rest in ((TEST, 32), (SELECTION, 0)):
        read.clear()
        task.whole_figures(predict, 1, "cpu", stream)
        assert sum(inputs.numel() for inputs in read) == len(task.part(stream))
        assert len(task.part(stream)) % 64 == rest


# --- what is refused -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"masked": 0.0}, "task.masked = 0.0: must be a share of the tokens"),
        ({"masked": 1.0}, "task.masked = 1.0: must be a share"),
        ({"mask": 60}, "task.mask = 60: must be a token of the vocabulary, 0 to 59"),
        ({"mask": -2}, "task.mask = -2: must be the number of a token, or -1 for that of"),
        ({"mask": -1}, "the mask token is not known"),
    ],
)
def test_bad_settings(settings: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=named):
        array_task(tmp_path, **settings)


def test_a_tokenizer_without_a_mask_token_is_refused(task: MaskedTokens, tmp_path: Path) -> None:
    path = save(byte_level(), tmp_path / "other" / "tokenizer.json")
    given = {"path": task.path, "valid": task.valid, "length": 8}
    without = MaskedTokens(**given, tokenizer=str(path))
    with pytest.raises(UserError, match="has no mask token; give the tokenizer of an encoder"):
        without.stored_data()
    # Settings beside the tokenizer may name any token; without both ends, a window has none.
    (path.parent / "tokenizer_config.json").write_text(json.dumps({"mask_token": "<|end|>"}))
    named = MaskedTokens(**given, tokenizer=str(path.parent))
    assert named.mask_token == named.reader.inner.token_to_id("<|end|>")
    assert named.ends == ()
    assert named.window == 8


def test_a_mask_token_that_the_tokenizer_does_not_have_is_refused(task: MaskedTokens) -> None:
    """The vocabulary is the tokenizer's, which is not read before the data are."""
    size = task.reader.size
    last, beyond = (replace(task, mask=number) for number in (size - 1, size))
    assert last.stored_data()["special tokens"].tolist() == [size - 1, FIRST, LAST]
    with pytest.raises(UserError, match=f"task.mask = {size}: must be .*, 0 to {size - 1}, or -1"):
        beyond.stored_data()


def test_a_window_without_room_is_refused(task: MaskedTokens) -> None:
    short = MaskedTokens(path=task.path, valid=task.valid, tokenizer=task.tokenizer, length=2)
    with pytest.raises(UserError, match=r"task\.length = 2: must be at least 3"):
        short.part(TRAINING)


def test_a_text_that_is_too_short_is_refused_with_the_length_as_given(task: MaskedTokens) -> None:
    with pytest.raises(UserError, match=r"task\.length = 4000 needs at least 3,999: give more"):
        replace(task, length=4000).part(TRAINING)


# --- a run ---------------------------------------------------------------------------------

RUN = """
[task]
name = "masked_tokens"
path = "text.txt"
split = 0.3
length = 12

[model]
from = "base"

[target]
fma = 4000

[train]
steps = 30
batch = 4
eval_every = 10
eval_batches = 1
final_batches = 2
checkpoint_every = 6
device = "cpu"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an imported encoder, a text and a config."""
    monkeypatch.chdir(tmp_path)
    write_encoder(Path("base"), 16)
    Path("text.txt").write_text(TEXT)
    Path("run.toml").write_text(RUN)
    return tmp_path


def start(name: str, existing: Existing = "refuse") -> Trainer:
    return Trainer(load_config(Path("run.toml"), {}), Path(name), existing)


@pytest.mark.usefixtures("undrawn")
def test_a_run_is_distilled_cut_resumed_and_measured(folder: Path, gaugelasso: Command) -> None:
    whole = start("whole")
    whole.run()
    config = read(Path("whole/config.json"))
    assert config["train"]["distill"] == 0.5
    assert config["compress"]["removal"] == "harm"
    summary = outcome(Path("whole"))
    assert summary["fma_final"] <= 4000 < summary["fma_initial"]
    assert summary["metric"]["name"] == "bits per masked token"
    figures = summary["figures"]
    assert 0 <= figures["accuracy"] <= 1
    stop_at(start("run"), 23)
    start("run", "resume").run()
    assert_same_run(Path("whole"), Path("run"))
    # The run has its own tokenizer, and so its own mask token.
    assert load_model("run").spec().length == 12
    code, told, _ = gaugelasso("eval", "run", "base", "--data", "text.txt", "--length", "12")
    assert code == 0
    assert told.count("accuracy") == 2
    code, told, _ = gaugelasso("report", "run")
    assert code == 0
    assert "accuracy" in Path("run/report/index.html").read_text()


def test_the_task_and_the_model_must_fit(folder: Path, gaugelasso: Command) -> None:
    with contextlib.redirect_stderr(io.StringIO()):  # a bar of progress
        gpt2(vocab_size=60, n_positions=16).save_pretrained("causal")
    write_imported(Path("causal"), Path("decoder"))
    changes = ("--set", "task.mask=4", "--set", "model.from=decoder")
    given = gaugelasso("train", "run.toml", "--out", "other", *changes)
    assert_user_error(given, "'masked_tokens' one for encoders")
    given = gaugelasso("train", "run.toml", "--out", "other", "--set", "task.name=tokens")
    assert_user_error(given, "'tokens' is a task for causal models")
    # A model without a head has hidden states as outputs.
    with contextlib.redirect_stderr(io.StringIO()):
        roberta(masked_lm=False, vocab_size=61, max_position_embeddings=16).save_pretrained("bare")
    write_imported(Path("bare"), Path("headless"))
    given = gaugelasso("train", "run.toml", "--out", "other", "--set", "task.mask=4",
                       "--set", "model.from=headless")  # fmt: skip
    assert_user_error(given, "its outputs is 64, and the task needs 61; give a model with a head")
    # What an architecture says of a model is what the model is.
    for name in ("causal", "bare", "base-source"):
        assert is_causal(open_source(name)) == import_model(name).spec().causal
    # Before anything is imported.
    compress = ("compress", "base-source", "--data", "text.txt", "--above-original", "5%")
    given = gaugelasso(*compress, "--out", "small", "--form", "hf")
    assert_user_error(given, "holds causal models, and the model is an encoder")
    assert not Path("small").exists()


def test_an_encoder_is_compressed(folder: Path, gaugelasso: Command) -> None:
    """In the form that it has, with losses of masked tokens."""
    Path("valid.txt").write_text(WORDS * 4)
    reader = load_tokenizer(Path("base"))
    counts = np.bincount(reader.encode([TEXT])[0], minlength=reader.size)
    weights = load_file("base-source/model.safetensors")
    # Knows little but how frequent each token is, which is more than a guess.
    weights["cls.predictions.transform.LayerNorm.weight"] *= 0.1
    weights["cls.predictions.bias"] = torch.from_numpy(counts + 0.1).log().float()
    save_file(weights, "base-source/model.safetensors", {"format": "pt"})
    texts = ("--data", "text.txt", "--valid", "valid.txt", "--above-original", "10%")
    sizes = ("--length", "12", "--steps", "20", "--batch", "4", "--device", "cpu")
    code, told, error = gaugelasso("compress", "base-source", *texts, *sizes, "--out", "small")
    assert code == 0, error
    assert {path.name for path in Path("small").iterdir()} == {
        "base", "original.json", "config.toml", "run", "native",
    }  # fmt: skip
    loss = read(Path("small/original.json"))["selection"]["loss"]
    assert f"original: {loss:.4f} nats per masked token, " in told
    (target,) = re.findall(r"target: (\S+) nats per masked token = ", told)
    assert float(target) == pytest.approx(1.1 * loss, abs=1e-4)
    assert "│ nats per masked token " in told
    assert "nats per token" not in told
    original = read(Path("small/original.json"))
    original["test"]["loss"] = 0.01
    Path("small/original.json").write_text(json.dumps(original))
    more = ("--out", "small", "--resume", "--form", "none")
    given = gaugelasso("compress", "base-source", *texts, *sizes, *more)
    assert_user_error(given, "nats per masked token on test data")
    assert "gaugelasso export small/run --form native does so" in given[2]
