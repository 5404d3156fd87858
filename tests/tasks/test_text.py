"""Texts from every source: decompressed once, cached safely, and rejected with a clear error."""

import gzip
import lzma
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gaugelasso.errors import UserError
from gaugelasso.tasks import CharLM, Draw, stored, text
from tests.command import Command, assert_user_error
from tests.tasks.prose import PROSE, fake_datasets, write

pytestmark = pytest.mark.usefixtures("own_cache")


CONFIGS = Path(__file__).parents[2] / "configs" / "charlm"


@pytest.mark.parametrize("name", ["a.txt", "a.txt.xz", "a.gz", "a"])
def test_a_file_is_its_bytes_compressed_or_not(tmp_path: Path, name: str) -> None:
    path, other = write(tmp_path / "in" / name), write(tmp_path / "other" / name)
    task = CharLM(path=str(path), valid=str(other), length=16)
    for part in task.texts:
        assert isinstance(part, np.memmap)
        assert part.tobytes() == PROSE
    cached = list((tmp_path / "cache").rglob("*.txt"))
    assert len(cached) == 2 * (path.suffix in {".xz", ".gz"})
    before = [file.stat().st_mtime_ns for file in cached]
    assert CharLM(path=str(path), valid=str(other), length=16).texts[0].tobytes() == PROSE
    assert [file.stat().st_mtime_ns for file in cached] == before, "decompressed twice"


def test_a_changed_archive_is_decompressed_again(tmp_path: Path) -> None:
    path = write(tmp_path / "a.xz")
    assert CharLM(path=str(path), split=0.1, length=16).texts[0].tobytes() in PROSE
    write(path, PROSE.upper())
    assert CharLM(path=str(path), split=0.1, length=16).texts[0].tobytes() in PROSE.upper()


def test_a_small_last_file_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path / "A.TXT", PROSE * 40)
    write(tmp_path / "notes.md", PROSE[:99])
    assert len(CharLM(path=str(tmp_path), length=4).texts[1]) == 99
    assert "the held-out text, notes.md, has 99 bytes, " in caplog.text


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


def test_the_cache_folder_can_be_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.xz")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "system"))

    def is_cached(where: str, cache: str = "") -> bool:
        assert CharLM(path=str(path), split=0.1, cache=cache, length=16).texts
        return len(list((tmp_path / where).glob("a-*.txt"))) == 1

    assert is_cached("home/mine", cache="~/mine")
    assert is_cached("cache")
    monkeypatch.delenv("GAUGELASSO_CACHE")
    assert is_cached("system/gaugelasso")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert is_cached("home/.cache/gaugelasso")


def test_only_the_first_block_is_checked(tmp_path: Path) -> None:
    """A check of all would read the whole file at every start."""
    data = b"text" * 2**18 + np.random.default_rng(0).bytes(5000)
    for name in ("a.txt", "a.gz"):
        train, valid = CharLM(path=str(write(tmp_path / name, data)), split=0.001, length=64).texts
        assert train.tobytes() + valid.tobytes() == data


@pytest.mark.parametrize("encoding", ["latin-1", "utf-8"])
def test_accents_of_an_old_encoding_are_accepted(tmp_path: Path, encoding: str) -> None:
    data = ("La fenêtre était ouverte; où était-elle allée ? " * 99 + "\x1a").encode(encoding)
    train, valid = CharLM(path=str(write(tmp_path / "a.txt", data)), split=0.2, length=64).texts
    assert train.tobytes() + valid.tobytes() == data


def test_nothing_is_opened_before_it_is_needed() -> None:
    assert CharLM(path="no/such/file.txt").outputs == 256


@pytest.fixture
def no_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)


def test_pg19_is_downloaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("size", [0, 700, 2**20])
def test_fingerprints_of_large_data_use_pieces(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "_HASHED_BYTES", 2**10)
    monkeypatch.setattr(stored, "_PIECES", 2**4)
    data = np.random.default_rng(0).integers(256, size=size, dtype=np.uint8)
    here = stored.fingerprint(data)
    assert here == stored.fingerprint(data.copy())
    assert here["bytes"] == size
    others = [data[:-1], data[1:], np.roll(data, 1), data[::-1].copy()] if size else []
    for place in (0, -1) if size else ():
        others.append(data.copy())
        others[-1][place] ^= 1
    assert all(stored.fingerprint(other) != here for other in others)


SPOILED_CACHES: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda data: data[:900],
    "zeros": lambda data: bytes(len(data)),
    "empty": lambda data: b"",
    "a byte": lambda data: data[:-1] + b"#",
}


@pytest.mark.parametrize("name", SPOILED_CACHES)
def test_a_damaged_cache_is_rebuilt(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    task = {"path": str(write(tmp_path / "a.txt.gz")), "split": 0.1, "length": 16}
    before = [part.tobytes() for part in CharLM(**task).texts]
    [cached] = (tmp_path / "cache").glob("*.txt")
    cached.write_bytes(SPOILED_CACHES[name](cached.read_bytes()))
    assert [part.tobytes() for part in CharLM(**task).texts] == before
    [warning] = caplog.messages
    assert re.search(r"^warning: cached text '.*\.txt' is damaged .* it is rebuilt$", warning)
    (tmp_path / "cache" / f"{cached.name}.json").write_text("{")
    assert [part.tobytes() for part in CharLM(**task).texts] == before
    (tmp_path / "cache" / f"{cached.name}.json").unlink()  # as earlier versions left it
    assert [part.tobytes() for part in CharLM(**task).texts] == before
    assert len(caplog.messages) == 2


def test_several_processes_may_decompress_the_same_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner, files = text._decompressed, [write(tmp_path / "a.txt.gz")]

    def decompressed(path: Path) -> Iterator[bytes]:
        monkeypatch.setattr(text, "_decompressed", inner)
        for block in inner(path):
            # As another process does, with the same pid on another machine that shares the disk.
            text.load(files, tmp_path / "cache")
            yield block

    monkeypatch.setattr(text, "_decompressed", decompressed)
    held = text.load(files, tmp_path / "cache").tobytes()
    assert held == gzip.decompress(files[0].read_bytes())
    assert len(list((tmp_path / "cache").iterdir())) == 2, "the text and its fingerprint"


def test_the_cache_is_flushed_before_it_is_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    replace = os.replace
    monkeypatch.setattr(os, "fsync", lambda _: done.append("flushed"))
    monkeypatch.setattr(os, "replace", lambda *paths: done.append("named") or replace(*paths))
    assert CharLM(path=str(write(tmp_path / "a.txt.gz")), split=0.1, length=16).texts
    assert done[:3] == ["flushed", "named", "flushed"]


def random_bytes(count: int, least: int) -> bytes:
    return np.random.default_rng(0).integers(least, 256, count, np.uint8).tobytes()


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
    "missing here": (
        lambda tmp: {"path": "not/there"},
        rf"'not/there': no such file or folder in '{re.escape(str(Path.cwd()))}'; give",
    ),
    "no home": (lambda tmp: {"path": "~nobody-here/x"}, r"task\.path = .*write the path in full"),
    "cache without a home": (
        lambda tmp: {"path": str(write(tmp / "a.xz")), "split": 0.1, "cache": "~nobody-here/x"},
        r"task\.cache = .*write the path in full",
    ),
    "one text twice": (
        lambda tmp: {"path": str(write(tmp / "a")), "valid": f"{tmp}/./a"},
        r"task\.valid = .*/\./a' contains all of task\.path = .*give another text",
    ),
    "training inside validation": (
        lambda tmp: {"path": str(write(tmp / "in" / "a.txt").parent), "valid": str(tmp)},
        r"contains all of task\.path",
    ),
    "missing valid": (
        lambda tmp: {"path": str(write(tmp / "a")), "valid": str(tmp / "x")},
        r"task\.valid = .*: no such file or folder",
    ),
    "folder without text": (lambda tmp: {"path": str(tmp)}, "no text in this folder"),
    "one file": (lambda tmp: {"path": str(write(tmp / "a"))}, r"is one file, .*task\.split=0\.05"),
    "folder of one": (
        lambda tmp: {"path": str(write(tmp / "in" / "a.txt").parent)},
        r"task\.path = .*/in' is a folder with one text, .*task\.valid, .*task\.split=0\.05",
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
        r"the validation text of .* has \d+ bytes; task\.length = 512 needs at least 2,561 "
        r"\(2 windows for selection and 2 for the test\): give more text, raise task\.split",
    ),
    "one byte too few to split": (
        lambda tmp: {
            "path": str(write(tmp / "a")),
            "valid": str(write(tmp / "b", PROSE[:80])),
            "length": 16,
        },
        r"has 80 bytes; task\.length = 16 needs at least 81 ",
    ),
    "no xz": (
        lambda tmp: archive(tmp / "a.xz", PROSE),
        "cannot be read .*; compress or download it again",
    ),
    "no gz": (
        lambda tmp: archive(tmp / "a.gz", PROSE),
        "cannot be read .*; compress or download it again",
    ),
    "cut xz": (
        lambda tmp: archive(tmp / "a.xz", lzma.compress(PROSE)[:-20]),
        "cannot be read .*; compress or download it again",
    ),
    "cut gz": (
        lambda tmp: archive(tmp / "a.gz", gzip.compress(PROSE)[:-20]),
        "cannot be read .*; compress or download it again",
    ),
    "junk": (lambda tmp: junk(tmp / "a.txt"), "of its bytes are zero; text must be in UTF-8"),
    "packed junk": (lambda tmp: junk(tmp / "a.txt.gz"), "of its bytes are zero; text must"),
    "little junk": (
        lambda tmp: {"path": str(write(tmp / "a", random_bytes(600, least=1))), "split": 0.1},
        "of its bytes are control characters; text must",
    ),
    "tar": (
        lambda tmp: {
            "path": str(write(tmp / "a", PROSE * 9 + bytes(len(PROSE) // 20))),
            "split": 0.1,
        },
        "of its bytes are zero; text must",
    ),
    "high junk": (
        lambda tmp: {"path": str(write(tmp / "a", random_bytes(5000, least=128))), "split": 0.1},
        "of its bytes are not UTF-8; text must be in UTF-8",
    ),
    "UTF-16": (
        lambda tmp: {"path": str(write(tmp / "a", PROSE.decode().encode("utf-16"))), "split": 0.1},
        "text must be in UTF-8",
    ),
    "cache is a file": (
        lambda tmp: {
            "path": str(write(tmp / "a.xz")),
            "split": 0.1,
            "cache": str(write(tmp / "b")),
        },
        "set task.cache to a folder with free space",
    ),
    "pg19 and a path": (
        lambda tmp: {"source": "pg19", "path": "x"},
        "task.source = 'pg19' has its own split",
    ),
    "both": (lambda tmp: {"path": "a", "valid": "b", "split": 0.1}, "remove one of them"),
    "split": (lambda tmp: {"split": 1.0}, r"task\.split = 1\.0"),
    "length": (lambda tmp: {"length": 0}, r"task\.length = 0"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gives_an_error_of_one_line(tmp_path: Path, name: str) -> None:
    settings, expected = BAD[name]
    with pytest.raises(UserError, match=expected) as raised:
        CharLM(**settings(tmp_path)).batch(1, Draw(0), "cpu")
    assert "\n" not in str(raised.value)
    assert not list(tmp_path.rglob("*.tmp"))
    if name in {"no xz", "no gz", "cut xz", "cut gz", "junk", "packed junk"}:
        assert not list(tmp_path.rglob("cache/**/*.txt")), "a partial text was cached"


@pytest.mark.parametrize("name", ["empty", "tiny", "junk", "packed junk", "cut gz", "no home"])
def test_bad_text_ends_a_command_with_an_error_of_one_line(
    tmp_path: Path, gaugelasso: Command, name: str
) -> None:
    settings, expected = BAD[name]
    keys = {"length": 512} | settings(tmp_path)
    changes = [f"--set=task.{key}={value}" for key, value in keys.items()]
    answer = gaugelasso("train", CONFIGS / "small.toml", "--out", tmp_path / "run", *changes)
    assert_user_error(answer, "")
    assert re.search(expected, answer[2])
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
    with pytest.raises(UserError, match="cannot be loaded: no route to host; check the network"):
        CharLM(source="pg19").batch(1, Draw(0), "cpu")
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
