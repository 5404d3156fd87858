"""The task over tokens: windows, bits per byte, its cache, and bad input."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gaugelasso.errors import UserError
from gaugelasso.files.tokenizer import Tokenizer, load_tokenizer
from gaugelasso.tasks import SELECTION, TEST, TRAINING, Draw, Tokens, tokenised
from tests.tasks.prose import write
from tests.tasks.tokenizers import WORDS, byte_level, save, with_fallback

pytestmark = pytest.mark.usefixtures("own_cache")

TEXT = WORDS * 6 + "日本語 and naïve words "


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return save(byte_level(), tmp_path / "tokenizer.json")


@pytest.fixture
def task(tmp_path: Path, tokenizer: Path) -> Tokens:
    train, valid = (
        write(tmp_path / "a.txt", TEXT.encode()),
        write(tmp_path / "b.txt", TEXT.encode()),
    )
    return Tokens(path=str(train), valid=str(valid), tokenizer=str(tokenizer), length=16)


def uniform(vocabulary: int) -> Any:
    return lambda inputs: torch.zeros(*inputs.shape, vocabulary)


def next_token(logit: float, task: Tokens) -> Any:
    """Logits that depend on the input, so that windows and masks matter."""

    def predict(inputs: Tensor) -> Tensor:
        return logit * torch.nn.functional.one_hot(inputs, task.inputs).float()

    return predict


# --- windows ---------------------------------------------------------------------------


def test_tokens_are_those_of_the_tokenizer(task: Tokens, tokenizer: Path) -> None:
    whole = load_tokenizer(tokenizer).encode([TEXT])[0]
    assert np.array_equal(task.part(TRAINING), whole)
    assert bytes(task.reader.decode(whole)).decode() == TEXT
    inputs, targets = task.batch(2, Draw(0, 0, SELECTION), "cpu")
    assert inputs.flatten().tolist() == whole[:32].tolist()
    assert targets.flatten().tolist() == whole[1:33].tolist()
    assert inputs.dtype == torch.long
    selection, test = task.part(SELECTION), task.part(TEST)
    assert len(selection) + len(test) < len(whole)
    assert np.array_equal(test, whole[-len(test) :])
    inputs, targets = task.batch(3, Draw(5, 7), "cpu")
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


@pytest.mark.parametrize("make", [byte_level, with_fallback])
def test_chunks_give_the_tokens_of_the_whole_text(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the tokenizer puts a space before a text: there it stands for the text's own."""
    reader = load_tokenizer(save(make(), tmp_path / "tokenizer.json"))
    assert reader.leads == (make is with_fallback)
    data = np.frombuffer(TEXT.encode(), np.uint8)
    monkeypatch.setattr(tokenised, "_CHUNK", 100)
    monkeypatch.setattr(tokenised, "_AT_ONCE", 3)
    found = tokenised.tokenised(data, reader, tmp_path / "cache", "text")
    assert np.array_equal(found, reader.encode([TEXT])[0])
    assert int(reader.sizes[found].sum()) == len(TEXT.encode()) + reader.leads


def test_a_share_may_begin_inside_a_character(tmp_path: Path, tokenizer: Path) -> None:
    text = write(tmp_path / "a.txt", ("é" * 999 + "x").encode())
    task = Tokens(path=str(text), split=0.5, tokenizer=str(tokenizer), length=16)
    train, valid = task.texts
    assert bytes(task.reader.decode(train)).decode() == "é" * 499
    assert bytes(task.reader.decode(valid)).decode() == "é" * 499 + "x"


# --- figures ---------------------------------------------------------------------------


def test_bits_per_byte_are_exact(task: Tokens) -> None:
    """All logits equal: log2 V bits a token, over the bytes that the counted tokens stand for."""
    part = task.part(TEST)
    size = len(bytes(task.reader.decode(part[1:])))
    figures = task.whole_figures(uniform(task.inputs), 1, "cpu")
    bits = math.log2(task.inputs)
    assert figures["loss"] == pytest.approx(math.log(task.inputs), rel=1e-6)
    assert figures["bits per byte"] == pytest.approx(bits * (len(part) - 1) / size, rel=1e-6)
    assert figures["bytes per token"] == size / (len(part) - 1)
    assert figures["bytes per token"] > 1.5


def test_figures_of_some_windows_count_each_once(task: Tokens) -> None:
    predict = next_token(3.0, task)
    whole = task.whole_figures(predict, 1, "cpu")
    draws = [Draw(0, index, TEST) for index in range(50)]  # more than there are windows
    assert task.final_figures(predict, 4, draws, "cpu") == whole
    some = task.final_figures(predict, 2, draws[:1], "cpu")
    inputs, targets = task.batch(2, draws[0], "cpu")
    assert some["loss"] == pytest.approx(float(task.loss(predict(inputs), targets)), rel=1e-6)
    metric = float(task.metric(predict(inputs), targets))
    assert some["bits per byte"] == pytest.approx(metric, rel=1e-6)
    assert some["loss"] != whole["loss"]


def test_a_text_is_measured_as_a_whole(task: Tokens) -> None:
    predict = next_token(2.0, task)
    ids = torch.from_numpy(task.part(TRAINING).astype(np.int64))
    inputs, targets = ids[:-1], ids[1:]
    nats = torch.nn.functional.cross_entropy(predict(inputs), targets, reduction="sum")
    figures = task.text_figures(predict, "cpu")
    size = len(TEXT.encode()) - len(task.reader.pieces[int(ids[0])])
    assert figures["bits per byte"] == pytest.approx(float(nats) / math.log(2) / size, rel=1e-5)
    few = task.text_figures(predict, "cpu", most=7)
    mean = torch.nn.functional.cross_entropy(predict(inputs[:7]), targets[:7])
    assert few["loss"] == pytest.approx(float(mean), rel=1e-6)


def test_arrays_need_no_tokenizer(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.arange(400, dtype=np.uint16) % 50)
    task = Tokens(path=str(tmp_path / "ids.npy"), split=0.5, vocabulary=50, length=8)
    assert (task.inputs, task.outputs, task.metric_name) == (50, 50, "bits per token")
    assert task.part(TRAINING).tolist() == [k % 50 for k in range(200)]
    assert task.part(SELECTION)[:3].tolist() == [0, 1, 2]
    figures = task.whole_figures(uniform(50), 1, "cpu")
    assert figures["bits per token"] == pytest.approx(math.log2(50), rel=1e-6)
    inputs, targets = task.batch(2, Draw(1), "cpu")
    assert float(task.metric(uniform(50)(inputs), targets)) == pytest.approx(math.log2(50))


def test_arrays_with_a_tokenizer_have_bytes(task: Tokens, tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", task.part(TRAINING).astype(np.int64))
    given = {"valid": task.valid, "tokenizer": task.tokenizer, "length": 16}
    arrays = Tokens(path=str(tmp_path / "ids.npy"), **given)
    predict = uniform(task.inputs)
    assert arrays.text_figures(predict, "cpu") == task.text_figures(predict, "cpu")


# --- the cache -------------------------------------------------------------------------


def refuse(self: Tokenizer, texts: list[str]) -> list[np.ndarray]:
    raise AssertionError("tokenised again")


def test_a_text_is_tokenised_once(task: Tokens, monkeypatch: pytest.MonkeyPatch) -> None:
    before = task.part(TRAINING).tolist()
    monkeypatch.setattr(Tokenizer, "encode", refuse)
    again = Tokens(path=task.path, valid=task.valid, tokenizer=task.tokenizer, length=16)
    assert again.part(TRAINING).tolist() == before


def test_another_text_or_tokenizer_is_tokenised_again(task: Tokens, tmp_path: Path) -> None:
    before = task.part(TRAINING).tolist()
    changed = WORDS.replace("fox", "dog") * 6  # as long as it was, at the same place
    Path(task.path).write_bytes(changed.encode())
    again = Tokens(path=task.path, valid=task.valid, tokenizer=task.tokenizer, length=16)
    assert bytes(again.reader.decode(again.part(TRAINING))).decode() == changed
    save(byte_level(290), Path(task.tokenizer))
    fewer = Tokens(path=task.path, valid=task.valid, tokenizer=task.tokenizer, length=16)
    assert len(fewer.part(TRAINING)) > len(again.part(TRAINING))
    assert fewer.part(TRAINING).tolist() != before


def test_a_damaged_cache_is_rebuilt(
    task: Tokens, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = task.part(TRAINING).tolist()
    for path in (tmp_path / "cache").glob("tokens-*.u2"):
        path.write_bytes(bytes(path.stat().st_size))
    again = Tokens(path=task.path, valid=task.valid, tokenizer=task.tokenizer, length=16)
    assert again.part(TRAINING).tolist() == before
    assert "damaged" in caplog.text


def test_the_data_of_a_run_include_the_tokenizer(task: Tokens) -> None:
    names = [*task.stored_data()]
    assert names[2] == "tokenizer"
    assert task.kept_files().keys() == {"tokenizer.json"}


# --- bad input -------------------------------------------------------------------------


def fails(message: str, **keys: Any) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        Tokens(**keys).part(TRAINING)


def test_bad_keys(tmp_path: Path, tokenizer: Path) -> None:
    text = str(write(tmp_path / "a.txt", TEXT.encode()))
    fails("task.tokenizer is empty", path=text)
    fails("task.tokenizer is empty, and text needs one", path=text, vocabulary=300, split=0.5)
    fails("task.length = 0", path=text, tokenizer="t", length=0)
    fails("task.split = 1.0", path=text, tokenizer="t", split=1.0)
    fails("task.vocabulary = -1", path=text, tokenizer="t", vocabulary=-1)
    fails("task.valid and task.split", path=text, tokenizer="t", valid=text, split=0.1)
    fails("'t': no such file; give a tokenizer.json", path=text, tokenizer="t", split=0.5)
    given = {"tokenizer": str(tokenizer), "split": 0.5}
    fails("tokens; task.length = 1024 needs at least", path=text, length=1024, **given)
    remedy = "give more text, lower task.split, or lower task.length"
    fails(remedy, path=text, length=8, **given | {"split": 0.99})
    fails(
        "highest token of the tokenizer is 299, and the model has the tokens 0 to 298",
        path=text, vocabulary=299, **given,
    )  # fmt: skip


def test_bad_texts(tmp_path: Path, tokenizer: Path) -> None:
    given = {"tokenizer": str(tokenizer), "split": 0.5, "length": 4}
    odd = write(tmp_path / "latin.txt", b"plain text, then \xe9t\xe9. " * 20)
    fails(f"{str(odd)!r}: not UTF-8 near byte 17; convert it", path=str(odd), **given)


def test_tokenizers_that_lose_bytes(tmp_path: Path) -> None:
    from tokenizers import normalizers

    changing = byte_level()
    changing.normalizer = normalizers.NFC()
    path = save(changing, tmp_path / "nfc.json")
    text = write(tmp_path / "a.txt", "e\u0301te\u0301 after e\u0301te\u0301 ".encode() * 9)
    fails("so bits per byte would be wrong", path=str(text), split=0.5, tokenizer=str(path))


def test_tokenizers_whose_bytes_are_not_known(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Words
    from tokenizers import models

    text = write(tmp_path / "a.txt", TEXT.encode())
    words = save(Words(models.WordLevel({"the": 0, "?": 1}, unk_token="?")), tmp_path / "w.json")
    fails("neither a byte-level tokenizer nor", path=str(text), split=0.5, tokenizer=str(words))
    for content in (b"", b"{}", b'{"version": "1.0", "model": 3}', b"\xff\xfe"):
        (tmp_path / "w.json").write_bytes(content)
        fails("not a readable tokenizer", path=str(text), split=0.5, tokenizer=str(words))


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros(100), "must be one row of whole numbers"),
        (np.zeros((10, 10), int), "must be one row of whole numbers"),
        (np.full(100, 50), "holds the token 50; the vocabulary has 0 to 49"),
        (np.full(100, -1), "holds the token -1"),
        (np.array([{}, {}], object), "not a readable .npy file"),
    ],
)
def test_bad_arrays(array: np.ndarray, message: str, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", array)
    fails(message, path=str(tmp_path / "a.npy"), split=0.5, vocabulary=50, length=4)


def array(path: Path) -> str:
    np.save(path, np.arange(40))
    return str(path)


def test_arrays_that_are_missing_or_damaged(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    fails("is task.path too", path=str(path), valid=str(path), vocabulary=50)
    fails(
        "is one file, and no other is left to hold out: give one in task.valid",
        path=array(path),
        vocabulary=50,
    )
    path.unlink()
    fails("no such file", path=str(path), split=0.5, vocabulary=50)
    for content in (b"", b"\x93NUMPY", b"text " * 50):
        path.write_bytes(content)
        fails("not a readable .npy file", path=str(path), split=0.5, vocabulary=50)
