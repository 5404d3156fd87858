"""Text as memory-mapped bytes.

A text is a file, or several files joined by a blank line. Compressed or joined files are written
to one cache file. Its name depends on the files it was made from and their modification times;
it is rebuilt if it is damaged. A single uncompressed file is mapped in place. No text is ever
loaded into memory as a whole.
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
# Share of a folder's files that is held out by default.
_HELD_OUT = 0.05
# Files differ in size. Held-out text of so many times less than its share is warned of.
_FAR_LESS = 5
# Control characters that text does not contain, apart from a stray end-of-file mark. They are one
# byte in ten of compressed or random data and every other byte of UTF-16. An uncompressed archive
# contains zero bytes.
_CONTROL = np.array([code for code in range(32) if code not in b"\b\t\n\v\f\r\x1b"], np.uint8)
_MOST_CONTROL, _MOST_ZERO = 1e-2, 1e-3
# Text in an old encoding has a few accents in a hundred bytes; these are learned like other bytes.
_MOST_INVALID = 0.25
# A copy of the data set as plain files: the original is a script, which `datasets` no longer runs.
_PG19 = "emozilla/pg19"
_log = logging.getLogger(__name__)


def find(path: str, key: str) -> list[Path]:
    """The file at `path`, or all texts below the folder at `path`, sorted by name."""
    if not path:
        raise UserError(f"{key} is empty; give a text file or a folder of text files")
    place = stored.expand(path, key)
    if place.is_file():
        return [place]
    if not place.is_dir():
        raise UserError(
            f"{key} = {path!r}: no such file or folder{stored.searched_in(place)}; give a text "
            "file or a folder of text files"
        )
    files = sorted(file for file in place.rglob("*") if file.is_file() and _is_text(file))
    if not files:
        kinds = " or ".join(sorted(_TEXTS))
        raise UserError(
            f"{key} = {path!r}: no text in this folder; add files that end in {kinds}, also "
            f"compressed ({' or '.join(_OPENERS)}), or give a single file"
        )
    return files


def _is_text(path: Path) -> bool:
    inner = path.with_suffix("") if path.suffix in _OPENERS else path
    return inner.suffix.lower() in _TEXTS


def without(files: list[Path], others: list[Path]) -> list[Path]:
    """`files` without `others`; links to the same file count as the same."""
    excluded = {file.resolve() for file in others}
    return [file for file in files if file.resolve() not in excluded]


def hold_out(files: list[Path], share: float) -> tuple[list[Path], list[Path]]:
    """Training and held-out files: the last `share` of them by name, at least one, never all."""
    count = min(max(1, round((share or _HELD_OUT) * len(files))), len(files) - 1)
    return files[: len(files) - count], files[len(files) - count :]


def load(files: list[Path], cache: Path) -> Text:
    """The joined bytes of these files, memory-mapped."""
    if len(files) == 1 and files[0].suffix not in _OPENERS:
        return _map(files[0])
    identity = [(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    digest = hashlib.sha256(repr(identity).encode()).hexdigest()[:16]
    name = f"{files[0].name.split('.')[0]}-{digest}"

    def blocks() -> Iterator[bytes]:
        for index, file in enumerate(files):
            if index:
                yield _BETWEEN
            yield from _decompressed(file)

    return _map(cached(cache / f"{name}.txt", blocks))


def load_parts(path: str, valid: str, split: float, cache: Path) -> tuple[Text, Text]:
    """Training and validation bytes, of task.path, task.valid and task.split."""
    files = find(path, "task.path")
    if valid:
        held_out = find(valid, "task.valid")
        # task.valid may lie inside the folder task.path.
        files = without(files, held_out)
        if not files:
            raise UserError(
                f"task.valid = {valid!r} contains all of task.path = {path!r}, so "
                "no text is left to train on; give another text in task.valid, or remove it "
                "and hold out a share with task.split"
            )
        return load(files, cache), load(held_out, cache)
    if len(files) > 1:
        train_files, held_out = hold_out(files, split)
        train, held = load(train_files, cache), load(held_out, cache)
        share = len(held) / max(1, len(train) + len(held))
        if share < (split or _HELD_OUT) / _FAR_LESS:
            _log.warning(
                "warning: task.path = %r: the held-out text, %s, has %s bytes, %.2g%% of all; name "
                "more in task.valid", path, ", ".join(file.name for file in held_out[:3]),
                f"{len(held):,}", 100 * share,
            )  # fmt: skip
        return train, held
    return split_end(load(files, cache), path, split)


def split_end(everything: np.ndarray, path: str, split: float) -> tuple[np.ndarray, np.ndarray]:
    """All but the last share, and that share; UserError if there is none."""
    if not split:
        folder = stored.expand(path, "task.path").is_dir()
        what = "is a folder with one text" if folder else "is one file"
        raise UserError(
            f"task.path = {path!r} {what}, and no other is left to hold out: give one in "
            "task.valid, or hold out a share at its end with task.split, for example "
            "task.split=0.05"
        )
    end = len(everything) - round(split * len(everything))
    return everything[:end], everything[end:]


def load_pg19(split: str, cache: Path) -> Text:
    """The books of one split of PG-19, downloaded once."""
    return _map(cached(cache / f"pg19-{split}.txt", lambda: _books(split)))


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
    except Exception as error:  # without a network, `datasets` raises a dozen types
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"PG-19 ({_PG19}, {split}) cannot be loaded: {reason}; check the network, or set "
            "task.source = 'files' and give a text of your own in task.path"
        ) from None


def _decompressed(path: Path) -> Iterator[bytes]:
    """A file in blocks, decompressed if its suffix is one of _OPENERS."""
    try:
        with _OPENERS.get(path.suffix, open)(path, "rb") as file:
            block = file.read(_BLOCK)
            _check(path, np.frombuffer(block, np.uint8))
            while block:
                yield block
                block = file.read(_BLOCK)
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise UserError(
            f"text {str(path)!r} cannot be read ({first_line(error)}); compress or download it "
            "again"
        ) from None


def cached(path: Path, blocks: Callable[[], Iterator[bytes]]) -> Path:
    """The cache file, written from the blocks if it is missing or damaged; never a partial file."""
    about = path.with_name(path.name + ".json")
    if path.is_file() and _is_intact(path, about):
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, blocks())
        _write(about, [_fingerprint(path)])
    except OSError as error:
        raise UserError(
            f"text cannot be written to the cache {str(path)!r} ({error.strerror}); set task.cache "
            "to a folder with free space"
        ) from None
    return path


def _write(path: Path, pieces: Iterable[bytes]) -> None:
    # Each writer has its own folder: runs on this machine and others may write the same file.
    with tempfile.TemporaryDirectory(dir=path.parent, ignore_cleanup_errors=True) as aside:
        written = Path(aside) / path.name
        durable.write_new(written, pieces)
        durable.rename(written, path)


def _fingerprint(path: Path) -> bytes:
    return json.dumps(stored.fingerprint(_mapped(path))).encode()


def _is_intact(path: Path, about: Path) -> bool:
    """Whether a cache file still has the fingerprint in `about`; warns if it does not."""
    try:
        if read_json(about) == stored.fingerprint(_mapped(path)):
            return True
        reason = "not as it was written"
    except FileNotFoundError:  # of an earlier version, or of a process that died in between
        with contextlib.suppress(OSError):  # the cache may be read-only
            _write(about, [_fingerprint(path)])
        return True
    except (OSError, ValueError, RecursionError) as error:
        reason = first_line(error)
    _log.warning("warning: cached text %r is damaged (%s); it is rebuilt", str(path), reason)
    return False


def _mapped(path: Path) -> Text:
    # An empty file cannot be mapped.
    empty = not path.stat().st_size
    return np.empty(0, np.uint8) if empty else np.memmap(path, np.uint8, "r")


def _map(path: Path) -> Text:
    try:
        text = _mapped(path)
    except OSError as error:
        raise UserError(
            f"text {str(path)!r} cannot be read ({error.strerror}); check its permissions"
        ) from None
    _check(path, text[:_BLOCK])
    return text


def _check(path: Path, block: Text) -> None:
    """UserError if the first block of a file is not text.

    Only the first block is checked: checking all would read the whole mapped file at every
    start, and other data rarely begin like text. Odd bytes further on are learned like others.
    """
    invalid = len(block) - len(block.tobytes().decode(errors="ignore").encode())
    for kind, count, most in (
        ("zero", np.count_nonzero(block == 0), _MOST_ZERO),
        ("control characters", np.isin(block, _CONTROL).sum(), _MOST_CONTROL),
        ("not UTF-8", invalid, _MOST_INVALID),
    ):
        if count > most * len(block):
            share = count / len(block)
            raise UserError(
                f"text {str(path)!r}: {share:.1%} of its bytes are {kind}; text must be "
                "in UTF-8 (iconv converts other encodings), and the name of a compressed file "
                "must end in .xz or .gz"
            )


def readable(tokens: Iterable[int]) -> Iterator[str]:
    """Decode bytes one by one; invalid UTF-8 and terminal control characters become �."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for token in tokens:
        yield _printable(decoder.decode(bytes([token])))
    yield _printable(decoder.decode(b"", final=True))


def _printable(text: str) -> str:
    return "".join(
        "\ufffd" if unicodedata.category(c) == "Cc" and c not in "\n\t" else c for c in text
    )
