"""Text as bytes on disk: found, unpacked once into a cache, memory-mapped.

A text is a file, or several joined by a blank line. What is packed or joined is written to
one cache file, whose name tells which files it was made of and when they were changed, and
made again if it is damaged; a plain file is mapped where it lies. Nothing is ever held in
memory as a whole.
"""

import codecs
import contextlib
import gzip
import hashlib
import json
import logging
import lzma
import tempfile
import unicodedata
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gaugelasso.errors import UserError, first_line
from gaugelasso.files import durable
from gaugelasso.files.untrusted import read_json
from gaugelasso.tasks import stored

Text = np.ndarray[Any, np.dtype[np.uint8]]

_OPENERS: dict[str, Callable[..., Any]] = {".xz": lzma.open, ".gz": gzip.open}
_TEXTS = {".txt", ".md"}
_BETWEEN = b"\n\n"
_BLOCK = 2**20
# Of a folder's files, unless told otherwise.
_HELD_OUT = 0.05
# Bytes that text has no use for, but for a stray mark of a file's end. Of packed or random data
# one in ten is such, of UTF-16 every other; of an archive that is not packed some are zero.
_CONTROL = np.array([code for code in range(32) if code not in b"\b\t\n\v\f\r\x1b"], np.uint8)
_MOST_CONTROL, _MOST_ZERO = 1e-2, 1e-3
# Of an old encoding's accents there are a few in a hundred, which are learned like other bytes.
_MOST_FOREIGN = 0.25
# The data set as plain files: the original is a program, which `datasets` no longer runs.
_PG19 = "emozilla/pg19"
_log = logging.getLogger(__name__)


def find(path: str, key: str) -> list[Path]:
    """The file of this name, or a folder's texts in the order of their names."""
    if not path:
        raise UserError(f"{key} is empty; give a text file or a folder of them")
    place = stored.place(path, key)
    if place.is_file():
        return [place]
    if not place.is_dir():
        raise UserError(
            f"{key} = {path!r}: no such file or folder{stored.seen_from(place)}; give a text file "
            "or a folder of them"
        )
    files = sorted(file for file in place.rglob("*") if file.is_file() and _is_text(file))
    if not files:
        kinds = " or ".join(sorted(_TEXTS))
        raise UserError(
            f"{key} = {path!r}: no text in this folder; put files into it that end in {kinds}, or "
            f"in these and {' or '.join(_OPENERS)}, or name a single file"
        )
    return files


def _is_text(path: Path) -> bool:
    inner = path.with_suffix("") if path.suffix in _OPENERS else path
    return inner.suffix in _TEXTS


def without(files: list[Path], others: list[Path]) -> list[Path]:
    """Those of the files that are none of the others, by whatever name or link."""
    known = {file.resolve() for file in others}
    return [file for file in files if file.resolve() not in known]


def hold_out(files: list[Path], share: float) -> tuple[list[Path], list[Path]]:
    """The last files, by name, apart: this share of them, at least one; never all."""
    count = min(max(1, round((share or _HELD_OUT) * len(files))), len(files) - 1)
    return files[: len(files) - count], files[len(files) - count :]


def load(files: list[Path], cache: Path) -> Text:
    """The bytes of these files, mapped."""
    if len(files) == 1 and files[0].suffix not in _OPENERS:
        return _map(files[0])
    marks = [(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    name = f"{files[0].name.split('.')[0]}-{hashlib.sha256(repr(marks).encode()).hexdigest()[:16]}"

    def blocks() -> Iterator[bytes]:
        for index, file in enumerate(files):
            if index:
                yield _BETWEEN
            yield from _unpacked(file)

    return _map(_kept(cache / f"{name}.txt", blocks))


def load_pg19(split: str, cache: Path) -> Text:
    """The books of one split of PG-19, downloaded once."""
    return _map(_kept(cache / f"pg19-{split}.txt", lambda: _books(split)))


def _books(split: str) -> Iterator[bytes]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise UserError(
            "task.source = 'pg19' needs the package datasets: pip install 'gaugelasso[text]'; or "
            "set task.source = 'files' and give a text of your own in task.path"
        ) from None
    try:
        for index, book in enumerate(load_dataset(_PG19, split=split, streaming=True)):
            yield (_BETWEEN if index else b"") + book["text"].encode()
    # Without a network this fails in a dozen ways, most with errors of other packages.
    except Exception as error:
        said = " ".join(str(error).split())[:200]
        raise UserError(
            f"PG-19 ({_PG19}, {split}) cannot be loaded: {said}; is there a network? Or set "
            "task.source = 'files' and give a text of your own in task.path"
        ) from None


def _unpacked(path: Path) -> Iterator[bytes]:
    """A file in blocks, unpacked where its name says it is packed."""
    try:
        with _OPENERS.get(path.suffix, open)(path, "rb") as file:
            block = file.read(_BLOCK)
            _check(path, np.frombuffer(block, np.uint8))
            while block:
                yield block
                block = file.read(_BLOCK)
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise UserError(
            f"text {str(path)!r} cannot be read ({first_line(error)}); pack or fetch it anew"
        ) from None


def _kept(path: Path, blocks: Callable[[], Iterator[bytes]]) -> Path:
    """The cache file of this name, made of the blocks if it is not there: whole or not at all."""
    known = path.with_name(path.name + ".json")
    if path.is_file() and _is_whole(path, known):
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, blocks())
        _write(known, [_known(path)])
    except OSError as error:
        raise UserError(
            f"text cannot be unpacked to {str(path)!r} ({error.strerror}); set task.cache to a "
            "folder with room"
        ) from None
    return path


def _write(path: Path, pieces: Iterable[bytes]) -> None:
    # A place of its own for each: runs side by side, on other machines too, may make the same file.
    with tempfile.TemporaryDirectory(dir=path.parent, ignore_cleanup_errors=True) as aside:
        written = Path(aside) / path.name
        durable.write_new(written, pieces)
        durable.rename(written, path)


def _known(path: Path) -> bytes:
    return json.dumps(stored.known(_mapped(path))).encode()


def _is_whole(path: Path, known: Path) -> bool:
    """Whether a cache file is as it was made, by what it is known by."""
    try:
        if read_json(known) == stored.known(_mapped(path)):
            return True
        said = "not as it was written"
    except FileNotFoundError:  # of an earlier version, or of a process that died in between
        with contextlib.suppress(OSError):  # another's cache may not be written
            _write(known, [_known(path)])
        return True
    except (OSError, ValueError, RecursionError) as error:
        said = first_line(error)
    _log.warning("warning: cached text %r is damaged (%s); it is made anew", str(path), said)
    return False


def _mapped(path: Path) -> Text:
    # Nothing cannot be mapped.
    empty = not path.stat().st_size
    return np.empty(0, np.uint8) if empty else np.memmap(path, np.uint8, "r")


def _map(path: Path) -> Text:
    try:
        text = _mapped(path)
    except OSError as error:
        raise UserError(
            f"text {str(path)!r} cannot be read ({error.strerror}); may you read it?"
        ) from None
    _check(path, text[:_BLOCK])
    return text


def _check(path: Path, block: Text) -> None:
    """Refuse what is no text by its first block.

    To look on would be to read all of a mapped text at every start, and what is no text
    rarely begins as one. Odd bytes further on are learned like others.
    """
    foreign = len(block) - len(block.tobytes().decode(errors="ignore").encode())
    for kind, count, most in (
        ("zero", np.count_nonzero(block == 0), _MOST_ZERO),
        ("control characters", np.isin(block, _CONTROL).sum(), _MOST_CONTROL),
        ("not UTF-8", foreign, _MOST_FOREIGN),
    ):
        if count > most * len(block):
            share = count / len(block)
            raise UserError(
                f"text {str(path)!r}: {share:.1%} of its bytes are {kind}; text must be "
                "in UTF-8 (iconv converts other encodings), and packed files end in .xz or .gz"
            )


def readable(tokens: Iterable[int]) -> Iterator[str]:
    """Bytes as they come, as text; what is no UTF-8 or controls a terminal becomes �."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for token in tokens:
        yield _shown(decoder.decode(bytes([token])))
    yield _shown(decoder.decode(b"", final=True))


def _shown(text: str) -> str:
    return "".join(
        "\ufffd" if unicodedata.category(c) == "Cc" and c not in "\n\t" else c for c in text
    )
