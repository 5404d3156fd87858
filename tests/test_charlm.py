"""The character language model: texts, windows, figures, and what a user is told."""

import gzip
import json
import lzma
import math
import os
import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gaugelasso.axes import named_tensors
from gaugelasso.config import load_config
from gaugelasso.errors import UserError
from gaugelasso.evaluation import evaluate, predictor
from gaugelasso.models import Transformer
from gaugelasso.pricing import ACCOUNTINGS, total_fma
from gaugelasso.report.data import load_run
from gaugelasso.report.results import collect_results
from gaugelasso.report.tables import before_after
from gaugelasso.tasks import EVALUATION, TASKS, CharLM, Draw, stored, text
from gaugelasso.tasks.text import readable
from gaugelasso.trainer import Trainer
from tests.command import Command, assert_told
from tests.training import assert_same_run, contents, read, stop_at

CONFIGS = Path(__file__).parents[1] / "configs" / "charlm"
PROSE = (
    b"The quick brown fox jumps over the lazy dog, \xc3\xa9t\xc3\xa9 after \xc3\xa9t\xc3\xa9.\n"
    * 20
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GAUGELASSO_CACHE", str(tmp_path / "cache"))


def write(path: Path, data: bytes = PROSE) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    opener: Callable[..., Any] = {".xz": lzma.open, ".gz": gzip.open}.get(path.suffix, open)
    with opener(path, "wb") as file:
        file.write(data)
    return path


def numbered(tmp_path: Path, size: int, length: int) -> CharLM:
    """Texts whose bytes tell where they stand: 0, 1, 2, ... (mod 251) in training."""
    train = write(tmp_path / "train.txt", bytes(1 + k % 251 for k in range(size)))
    valid = write(tmp_path / "valid.txt", bytes(1 + 7 * k % 251 for k in range(5 * length + 3)))
    return CharLM(path=str(train), valid=str(valid), length=length)


def starts(task: CharLM, size: int, index: int, run: int = 0) -> list[int]:
    tokens, targets = task.batch(size, Draw(run, index), "cpu")
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    return (tokens[:, 0] - 1).tolist()


# --- texts ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.txt", "a.txt.xz", "a.gz", "a"])
def test_a_file_is_its_bytes_packed_or_not(tmp_path: Path, name: str) -> None:
    path, other = write(tmp_path / "in" / name), write(tmp_path / "other" / name)
    task = CharLM(path=str(path), valid=str(other), length=16)
    for part in task.texts:
        assert isinstance(part, np.memmap)
        assert part.tobytes() == PROSE
    cached = list((tmp_path / "cache").rglob("*.txt"))
    assert len(cached) == 2 * (path.suffix in {".xz", ".gz"})
    before = [file.stat().st_mtime_ns for file in cached]
    assert CharLM(path=str(path), valid=str(other), length=16).texts[0].tobytes() == PROSE
    assert [file.stat().st_mtime_ns for file in cached] == before, "unpacked twice"


def test_a_changed_archive_is_unpacked_again(tmp_path: Path) -> None:
    path = write(tmp_path / "a.xz")
    assert CharLM(path=str(path), split=0.1, length=16).texts[0].tobytes() in PROSE
    write(path, PROSE.upper())
    assert CharLM(path=str(path), split=0.1, length=16).texts[0].tobytes() in PROSE.upper()


def test_a_folder_is_split_by_file(tmp_path: Path) -> None:
    for k in range(30):
        write(tmp_path / "in" / f"{k:02}.txt{('', '.xz', '.gz')[k % 3]}", b"book %02d " % k * 20)
    write(tmp_path / "in" / "cover.png", b"\0" * 999)
    task = CharLM(path=str(tmp_path / "in"), cache=str(tmp_path / "here"), length=16)
    train, valid = (part.tobytes() for part in task.texts)
    books = [b"book %02d " % k * 20 for k in range(30)]
    # Five per cent of thirty, rounded: the last two by name.
    assert train == b"\n\n".join(books[:28])
    assert valid == b"\n\n".join(books[28:])
    assert len(list((tmp_path / "here").glob("*.txt"))) == 2
    wider = CharLM(path=str(tmp_path / "in"), split=0.5, length=16)
    assert wider.texts[1].tobytes() == b"\n\n".join(books[15:])


def test_a_share_at_the_end_of_one_file_is_held_out(tmp_path: Path) -> None:
    task = CharLM(path=str(write(tmp_path / "a.txt")), split=0.25, length=16)
    train, valid = (part.tobytes() for part in task.texts)
    assert train + valid == PROSE
    assert len(valid) == len(PROSE) // 4


@pytest.mark.parametrize("valid", ["v", "v/b.txt", "link.txt"])
def test_a_validation_text_inside_the_folder_is_not_trained_on(tmp_path: Path, valid: str) -> None:
    books = tmp_path / "books"
    write(books / "a.txt", b"training " * 9)
    write(books / "v" / "b.txt", b"validation " * 9)
    (books / "link.txt").symlink_to(books / "v" / "b.txt")
    train, held_out = CharLM(path=str(books), valid=str(books / valid), length=16).texts
    assert train.tobytes() == b"training " * 9
    assert held_out.tobytes() == b"validation " * 9


def test_the_cache_is_where_the_user_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.xz")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "system"))

    def kept(where: str, told: str = "") -> bool:
        assert CharLM(path=str(path), split=0.1, cache=told, length=16).texts
        return len(list((tmp_path / where).glob("a-*.txt"))) == 1

    assert kept("home/mine", told="~/mine")
    assert kept("cache")
    monkeypatch.delenv("GAUGELASSO_CACHE")
    assert kept("system/gaugelasso")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert kept("home/.cache/gaugelasso")


def test_only_the_start_tells_what_is_no_text(tmp_path: Path) -> None:
    """To look on would be to read all of it at every start."""
    data = b"text" * 2**18 + np.random.default_rng(0).bytes(5000)
    for name in ("a.txt", "a.gz"):
        train, valid = CharLM(path=str(write(tmp_path / name, data)), split=0.001).texts
        assert train.tobytes() + valid.tobytes() == data


def test_nothing_is_opened_before_it_is_needed() -> None:
    assert CharLM(path="no/such/file.txt").outputs == 256


@pytest.fixture
def no_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)


def fake_datasets(monkeypatch: pytest.MonkeyPatch, books: Callable[[str], Iterator[Any]]) -> None:
    module = types.ModuleType("datasets")
    module.load_dataset = lambda name, split, streaming: books(split)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)


def test_pg19_is_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = []

    def books(split: str) -> Iterator[dict[str, str]]:
        fetched.append(split)
        return ({"text": f"{split} {k} été " * 9} for k in range(2))

    fake_datasets(monkeypatch, books)
    for _ in range(2):
        train, valid = CharLM(source="pg19", length=16).texts
        assert train.tobytes().decode() == "\n\n".join(f"train {k} été " * 9 for k in range(2))
        assert valid.tobytes().startswith(b"validation 0 ")
    assert fetched == ["train", "validation"]


# --- windows -------------------------------------------------------------------------


def test_an_epoch_reads_every_window_once(tmp_path: Path) -> None:
    length, size = 8, 240
    task = numbered(tmp_path, size, length)
    count = size // length - 1
    seen = [starts(task, 1, k)[0] for k in range(3 * count)]
    epochs = [seen[e * count : (e + 1) * count] for e in range(3)]
    offsets = [min(epoch) for epoch in epochs]
    for offset, epoch in zip(offsets, epochs, strict=True):
        assert 0 <= offset < length
        assert sorted(epoch) == [offset + length * k for k in range(count)]
        assert epoch != sorted(epoch)
    assert len(set(offsets)) > 1
    assert len({tuple((s - o) for s in e) for o, e in zip(offsets, epochs, strict=True)}) == 3


def test_a_batch_is_a_function_of_run_and_index(tmp_path: Path) -> None:
    task = numbered(tmp_path, 240, 8)
    one_by_one = [starts(task, 1, k)[0] for k in range(60)]
    for size in (4, 20):  # within an epoch, and across two
        again = [s for k in reversed(range(60 // size)) for s in reversed(starts(task, size, k))]
        assert again[::-1] == one_by_one
    assert [starts(task, 1, k, run=1)[0] for k in range(60)] != one_by_one


@pytest.mark.parametrize("size", [9, 10, 15, 16, 17, 24, 25])
def test_short_texts_are_read_to_their_end(tmp_path: Path, size: int) -> None:
    task = numbered(tmp_path, size, 8)
    seen = {s for k in range(40) for s in starts(task, 4, k)}
    assert min(seen) == 0
    assert max(seen) == size - 9


def test_held_out_windows_stand_in_order(tmp_path: Path) -> None:
    task = numbered(tmp_path, 100, 8)
    valid = task.texts[1]
    rows = [task.batch(2, Draw(run, k, EVALUATION), "cpu") for run, k in ((0, 0), (7, 1), (0, 2))]
    tokens = torch.cat([inputs for inputs, _ in rows]).flatten().numpy()
    assert np.array_equal(tokens[:40], valid[:40])
    assert np.array_equal(tokens[40:], valid[:8]), "round again"
    targets = torch.cat([targets for _, targets in rows]).flatten().numpy()
    assert np.array_equal(targets[:40], valid[1:41])


# --- figures -------------------------------------------------------------------------


def test_final_figures_are_of_every_byte_but_the_first(tmp_path: Path) -> None:
    """A table of pairs has a loss that can be counted by hand, the last, short window too."""
    task = numbered(tmp_path, 100, 8)
    table = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    valid = torch.tensor(np.array(task.texts[1])).long()
    expected = torch.nn.functional.cross_entropy(table[valid[:-1]].double(), valid[1:])

    def forward(tokens: Tensor) -> Tensor:
        return table[tokens]

    figures = task.final_figures(forward, 4, [], "cpu")
    assert figures["loss"] == pytest.approx(float(expected), rel=1e-6)
    assert figures["bits per byte"] == pytest.approx(figures["loss"] / math.log(2))
    assert figures["perplexity"] == pytest.approx(math.exp(figures["loss"]))


def test_the_metric_is_the_loss_in_bits(tmp_path: Path) -> None:
    task = numbered(tmp_path, 100, 8)
    _, targets = task.batch(3, Draw(0), "cpu")
    assert float(task.metric(torch.zeros(3, 8, 256), targets)) == pytest.approx(8)


@pytest.mark.parametrize(
    ("name", "fma"),
    [
        ("uniform", 7_602_336),
        ("main", 53_706_240),
        ("loose", 53_706_240),
        ("deep", 113_351_040),
    ],
)
def test_the_configs_are_of_the_paper_s_size(name: str, fma: int) -> None:
    config = load_config(CONFIGS / f"{name}.toml")
    with torch.device("meta"):
        model = Transformer(config.model.spec(config.task))
    accounting = ACCOUNTINGS[config.compress.accounting]
    assert total_fma(model.axis_table(), accounting, named_tensors(model)) == fma
    assert config.train.batch * config.train.accumulate == 96
    assert config.task.length == 512


# --- a run ---------------------------------------------------------------------------

TINY = {
    "task.length": 8, "model.width": 8, "model.layers": 1, "model.heads": 2, "model.d_k": 4,
    "model.d_v": 4, "model.d_f": 8, "target.loss": 5.0, "compress.lr": 0.02, "compress.interval": 5,
    "compress.trust": 4.0, "train.steps": 30, "train.warmup": 4, "train.cooldown": 8,
    "train.batch": 4, "train.log_every": 5, "train.eval_every": 10, "train.eval_batches": 1,
    "train.final_batches": 2, "train.checkpoint_every": 10, "train.device": "cpu",
}  # fmt: skip


def tiny(path: Path, **changes: Any) -> Any:
    settings = TINY | {"task.path": str(path), "task.split": 0.2}
    settings |= {key.replace("__", "."): value for key, value in changes.items()}
    return load_config(
        CONFIGS / "small.toml", {key: json.dumps(value) for key, value in settings.items()}
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("charlm")
    Trainer(tiny(write(folder / "a.txt")), folder / "run").run()
    return folder / "run"


def test_the_summary_is_of_the_whole_validation_text(run: Path) -> None:
    summary = read(run / "summary.json")
    assert summary["fma_final"] < summary["fma_initial"]
    config = tiny(run.parent / "a.txt")
    trainer = Trainer(config, run, "resume")
    figures = config.task.final_figures(predictor(trainer.model, config, "cpu"), 4, [], "cpu")
    assert summary["loss"] == figures["loss"]
    assert summary["metric"] == {"name": "bits per byte", "value": figures["bits per byte"]}
    assert summary["figures"] == {"perplexity": figures["perplexity"]}
    sampled, _ = evaluate(trainer.model, config, 2, "cpu")
    assert sampled != summary["loss"]


def test_the_report_shows_the_figures(run: Path) -> None:
    Trainer(tiny(run.parent / "a.txt"), run.parent / "shown").run()
    shown = run.parent / "shown"
    perplexity = read(shown / "summary.json")["figures"]["perplexity"]
    rows = {row[0]: row for row in before_after([load_run(shown)]).rows}
    assert rows["perplexity"][2] == f"{perplexity:.4g}"
    assert rows["bits per byte"][2] == f"{math.log2(perplexity):.4g}"
    assert collect_results([shown])["runs"][0]["figures"] == {"perplexity": perplexity}


def test_a_resumed_run_reads_on_where_it_was(tmp_path: Path) -> None:
    config = tiny(write(tmp_path / "a.txt"))
    Trainer(config, tmp_path / "whole").run()
    stop_at(Trainer(config, tmp_path / "died"), 23)
    Trainer(tiny(tmp_path / "a.txt"), tmp_path / "died", "resume").run()
    assert_same_run(tmp_path / "whole", tmp_path / "died")


@pytest.mark.parametrize("part", ["training", "validation"])
def test_a_run_goes_on_with_the_text_it_began_with(tmp_path: Path, part: str) -> None:
    path = write(tmp_path / "a.txt")
    stop_at(Trainer(tiny(path), tmp_path / "run"), 23)
    before, data = contents(tmp_path / "run"), path.read_bytes()
    at = 99 if part == "training" else len(data) - 99
    path.write_bytes(data[:at] + b"#" + data[at + 1 :])
    with pytest.raises(UserError, match=rf"^--resume: the {part} text of '.*a.txt', .* put that"):
        Trainer(tiny(path), tmp_path / "run", "resume")
    assert contents(tmp_path / "run") == before
    path.write_bytes(data)
    Trainer(tiny(path), tmp_path / "run", "resume").folder.close()


def test_a_run_that_did_not_tell_its_data_goes_on(tmp_path: Path) -> None:
    """As those of earlier versions."""
    path = write(tmp_path / "a.txt")
    stop_at(Trainer(tiny(path), tmp_path / "run"), 23)
    initial = read(tmp_path / "run" / "initial.json")
    assert initial.pop("data")
    (tmp_path / "run" / "initial.json").write_text(json.dumps(initial))
    Trainer(tiny(path), tmp_path / "run", "resume").folder.close()


@pytest.mark.parametrize("size", [0, 700, 2**20])
def test_large_data_are_known_by_pieces(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "_LOOKED_AT", 2**10)
    monkeypatch.setattr(stored, "_PIECES", 2**4)
    data = np.random.default_rng(0).integers(256, size=size, dtype=np.uint8)
    here = stored.known(data)
    assert here == stored.known(data.copy())
    assert here["bytes"] == size
    others = [data[:-1], data[1:], np.roll(data, 1), data[::-1].copy()] if size else []
    for place in (0, -1) if size else ():
        others.append(data.copy())
        others[-1][place] ^= 1
    assert all(stored.known(other) != here for other in others)


SPOILED_CACHES: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda data: data[:900],
    "zeros": lambda data: bytes(len(data)),
    "empty": lambda data: b"",
    "a byte": lambda data: data[:-1] + b"#",
}


@pytest.mark.parametrize("name", SPOILED_CACHES)
def test_a_damaged_cache_is_made_anew(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    task = {"path": str(write(tmp_path / "a.txt.gz")), "split": 0.1, "length": 16}
    before = [part.tobytes() for part in CharLM(**task).texts]
    [cached] = (tmp_path / "cache").glob("*.txt")
    cached.write_bytes(SPOILED_CACHES[name](cached.read_bytes()))
    assert [part.tobytes() for part in CharLM(**task).texts] == before
    [told] = caplog.messages
    assert re.search(r"^warning: cached text '.*\.txt' is damaged .* made anew$", told)
    (tmp_path / "cache" / f"{cached.name}.json").write_text("{")
    assert [part.tobytes() for part in CharLM(**task).texts] == before
    (tmp_path / "cache" / f"{cached.name}.json").unlink()  # as earlier versions left it
    assert [part.tobytes() for part in CharLM(**task).texts] == before
    assert len(caplog.messages) == 2


def test_others_may_unpack_the_same_text_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner, files = text._unpacked, [write(tmp_path / "a.txt.gz")]

    def unpacked(path: Path) -> Iterator[bytes]:
        monkeypatch.setattr(text, "_unpacked", inner)
        for block in inner(path):
            # By another process of the same number, as on two machines that share a disk.
            text.load(files, tmp_path / "cache")
            yield block

    monkeypatch.setattr(text, "_unpacked", unpacked)
    held = text.load(files, tmp_path / "cache").tobytes()
    assert held == gzip.decompress(files[0].read_bytes())
    assert len(list((tmp_path / "cache").iterdir())) == 2, "the text, and what it is known by"


def test_the_cache_is_flushed_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    replace = os.replace
    monkeypatch.setattr(os, "fsync", lambda _: done.append("flushed"))
    monkeypatch.setattr(os, "replace", lambda *paths: done.append("named") or replace(*paths))
    assert CharLM(path=str(write(tmp_path / "a.txt.gz")), split=0.1, length=16).texts
    assert done[:3] == ["flushed", "named", "flushed"]


def test_a_missing_text_never_costs_an_existing_run(tmp_path: Path) -> None:
    Trainer(tiny(write(tmp_path / "a.txt")), tmp_path / "run").run()
    before = contents(tmp_path / "run")
    with pytest.raises(UserError, match="no such file or folder"):
        Trainer(tiny(tmp_path / "gone.txt"), tmp_path / "run", "overwrite")
    assert contents(tmp_path / "run") == before


# --- the command line ----------------------------------------------------------------


def test_generate_goes_on_from_the_prompt(run: Path, gaugelasso: Command) -> None:
    options = ("--prompt", "été \x1b[1m", "--length", 60, "--device", "cpu")
    code, out, err = gaugelasso("generate", run, *options)
    assert (code, err) == (0, "")
    # A control character is shown, not obeyed; so is what is no UTF-8.
    assert out.startswith("été \ufffd[1m")
    assert 10 < len(out) <= len("été \x1b[1m") + 60 + 1
    assert gaugelasso("generate", run, *options)[1] == out
    assert gaugelasso("generate", run, *options, "--seed", 1)[1] != out
    greedy = [gaugelasso("generate", run, "--temperature", 0, "--seed", s)[1] for s in (0, 1)]
    assert greedy[0] == greedy[1]
    assert greedy[0] == gaugelasso("generate", run, "--top-k", 1)[1]


def test_generate_says_why_it_cannot(run: Path, tmp_path: Path, gaugelasso: Command) -> None:
    def told(*arguments: str | Path) -> str:
        code, _, err = gaugelasso("generate", *arguments)
        assert code == 2
        assert len(err.strip().splitlines()) == 1
        return err

    assert "the prompt is empty" in told(run, "--prompt", "")
    assert "no such file" in told(tmp_path / "none")
    config = read(run / "config.json")
    config["task"] = {"name": "retrieval"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "learned 'retrieval'; text comes from runs of 'charlm' only" in told(tmp_path)


def test_eval_of_another_text(run: Path, tmp_path: Path, gaugelasso: Command) -> None:
    other = write(tmp_path / "other.txt", PROSE.upper())
    options = ("--set", f"task.valid={other}", "--set", "task.split=0", "--device", "cpu")
    code, out, err = gaugelasso("eval", run, "--whole", *options)
    assert (code, err) == (0, "")
    assert out.startswith("loss ")
    assert "perplexity" in out
    assert out.endswith("(all held-out data)\n")
    assert gaugelasso("eval", run, "--whole", "--batches", 1, *options)[1] == out
    code, _, err = gaugelasso("eval", run, "--set", "task.length=512")
    assert code == 2
    assert "does not fit this task's length" in err


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (b"a\xc3\xa9\n\tb", "aé\n\tb"),
        (b"a\xc3b\xff\xf0\x9f", "a\ufffdb\ufffd\ufffd"),
        (b"\x1b[2J\x00\x7f\r", "\ufffd[2J\ufffd\ufffd\ufffd"),
        (b"", ""),
    ],
)
def test_any_bytes_can_be_shown(tokens: bytes, said: str) -> None:
    assert "".join(readable(tokens)) == said


# --- bad input -----------------------------------------------------------------------


def junk(path: Path) -> dict[str, Any]:
    return {"path": str(write(path, np.random.default_rng(0).bytes(5000))), "split": 0.1}


def archive(path: Path, data: bytes) -> dict[str, Any]:
    path.write_bytes(data)
    return {"path": str(path), "split": 0.1}


BAD: dict[str, tuple[Callable[[Path], dict[str, Any]], str]] = {
    "no path": (lambda tmp: {}, "task.path is empty"),
    "missing": (
        lambda tmp: {"path": str(tmp / "x")},
        r"task\.path = .*: no such file or folder; give a text file",
    ),
    "no home": (lambda tmp: {"path": "~nobody-here/x"}, r"task\.path = .*write the path in full"),
    "cache without a home": (
        lambda tmp: {"path": str(write(tmp / "a.xz")), "split": 0.1, "cache": "~nobody-here/x"},
        r"task\.cache = .*write the path in full",
    ),
    "one text twice": (
        lambda tmp: {"path": str(write(tmp / "a")), "valid": f"{tmp}/./a"},
        r"task\.valid = .*/\./a' holds all of task\.path = .*name another text",
    ),
    "training inside validation": (
        lambda tmp: {"path": str(write(tmp / "in" / "a.txt").parent), "valid": str(tmp)},
        r"holds all of task\.path",
    ),
    "missing valid": (
        lambda tmp: {"path": str(write(tmp / "a")), "valid": str(tmp / "x")},
        r"task\.valid = .*: no such file or folder",
    ),
    "folder without text": (lambda tmp: {"path": str(tmp)}, "no text in this folder"),
    "one file": (lambda tmp: {"path": str(write(tmp / "a"))}, r"is one file: .*task\.split=0\.05"),
    "folder of one": (
        lambda tmp: {"path": str(write(tmp / "in" / "a.txt").parent)},
        "is one file",
    ),
    "empty": (
        lambda tmp: {"path": str(write(tmp / "a", b"")), "split": 0.1},
        "training text of .* has 0 bytes; task.length = 512 needs at least 513: give more text",
    ),
    "empty archive": (
        lambda tmp: {"path": str(write(tmp / "a.xz", b"")), "split": 0.1},
        "has 0 bytes",
    ),
    "tiny": (lambda tmp: {"path": str(write(tmp / "a", b"x" * 512)), "split": 0.1}, "461 bytes"),
    "tiny valid": (
        lambda tmp: {"path": str(write(tmp / "a")), "split": 0.01},
        r"the validation text of .* has \d+ bytes",
    ),
    "no xz": (lambda tmp: archive(tmp / "a.xz", PROSE), "cannot be read .* is the file whole"),
    "no gz": (lambda tmp: archive(tmp / "a.gz", PROSE), "cannot be read .* is the file whole"),
    "cut xz": (
        lambda tmp: archive(tmp / "a.xz", lzma.compress(PROSE)[:-20]),
        "cannot be read .* is the file whole",
    ),
    "cut gz": (
        lambda tmp: archive(tmp / "a.gz", gzip.compress(PROSE)[:-20]),
        "cannot be read .* is the file whole",
    ),
    "junk": (lambda tmp: junk(tmp / "a.txt"), "bytes are zero, so it is no text"),
    "packed junk": (lambda tmp: junk(tmp / "a.txt.gz"), "bytes are zero, so it is no text"),
    "UTF-16": (
        lambda tmp: {"path": str(write(tmp / "a", PROSE.decode().encode("utf-16"))), "split": 0.1},
        "text be in UTF-8",
    ),
    "cache is a file": (
        lambda tmp: {
            "path": str(write(tmp / "a.xz")),
            "split": 0.1,
            "cache": str(write(tmp / "b")),
        },
        "set task.cache to a folder with room",
    ),
    "pg19 and a path": (
        lambda tmp: {"source": "pg19", "path": "x"},
        "task.source = 'pg19' brings its own split",
    ),
    "both": (lambda tmp: {"path": "a", "valid": "b", "split": 0.1}, "give one of them"),
    "split": (lambda tmp: {"split": 1.0}, r"task\.split = 1\.0"),
    "length": (lambda tmp: {"length": 0}, r"task\.length = 0"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_told_in_one_line(tmp_path: Path, name: str) -> None:
    settings, said = BAD[name]
    with pytest.raises(UserError, match=said) as told:
        CharLM(**settings(tmp_path)).batch(1, Draw(0), "cpu")
    assert "\n" not in str(told.value)
    assert not list(tmp_path.rglob("*.tmp"))
    if name in {"no xz", "no gz", "cut xz", "cut gz", "junk", "packed junk"}:
        assert not list(tmp_path.rglob("cache/**/*.txt")), "half a text was kept"


@pytest.mark.parametrize("name", ["empty", "tiny", "junk", "packed junk", "cut gz", "no home"])
def test_bad_text_ends_a_command_with_one_line(
    tmp_path: Path, gaugelasso: Command, name: str
) -> None:
    settings, said = BAD[name]
    keys = {"length": 512} | settings(tmp_path)
    changes = [f"--set=task.{key}={value}" for key, value in keys.items()]
    answer = gaugelasso("train", CONFIGS / "small.toml", "--out", tmp_path / "run", *changes)
    assert_told(answer, "")
    assert re.search(said, answer[2])
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("no_datasets")
def test_a_missing_package_is_named() -> None:
    with pytest.raises(UserError, match=r"pip install 'gaugelasso\[text\]'"):
        CharLM(source="pg19").batch(1, Draw(0), "cpu")


def test_a_missing_network_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def books(split: str) -> Iterator[dict[str, str]]:
        yield {"text": "half a book"}
        raise ConnectionError("no route\nto host")

    fake_datasets(monkeypatch, books)
    with pytest.raises(UserError, match="cannot be loaded: no route to host; is there a network"):
        CharLM(source="pg19").batch(1, Draw(0), "cpu")
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_the_defaults_are_the_paper_s() -> None:
    assert TASKS["charlm"]() == CharLM(length=512)
