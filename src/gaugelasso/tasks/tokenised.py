"""Text as numbers of tokens: made once by a tokenizer, stored in the cache, and memory-mapped.

The name of a cache file is a digest of the whole text and of the tokenizer's file, so another text
or another tokenizer makes another file. A text is tokenised in chunks, which end before a space
between two letters: there no tokenizer joins what stands before and after it.
"""

import codecs
import hashlib
import itertools
import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from gaugelasso.errors import UserError, first_line
from gaugelasso.files.tokenizer import Tokenizer
from gaugelasso.files.untrusted import UNREADABLE, open_plain
from gaugelasso.tasks import text
from gaugelasso.tasks.windows import Array

# Bytes of a chunk, and chunks that the tokenizer takes at once, one for each thread it has.
_CHUNK, _AT_ONCE = 2**18, 16
# Characters at the end of a chunk in which a place to end it is looked for.
_SEARCHED = 2**12
# Bytes of a text that takes so long that it is announced.
_LONG = 2**24
# Of the way in which text becomes tokens; another way takes another number.
_LAYOUT = 1
_log = logging.getLogger(__name__)


def tokenised(
    data: text.Text, tokenizer: Tokenizer, cache: Path, origin: str, exact: bool = True
) -> Array:
    """The tokens of a text, memory-mapped; `origin` names the text in errors.

    With `exact` they must stand for all of its bytes; those of WordPiece do not.
    """
    kind = np.dtype("<u2" if tokenizer.size <= 2**16 else "<u4")
    digest = hashlib.sha256(data.data)
    digest.update(f"{tokenizer.sha256} {_LAYOUT}{'' if exact else ' inexact'}".encode())
    name = f"tokens-{digest.hexdigest()[:32]}.{kind.str[1:]}"
    path = text.cached(cache / name, lambda: _blocks(data, tokenizer, kind, origin, exact))
    return np.memmap(path, kind, "r") if path.stat().st_size else np.empty(0, kind)


def _blocks(
    data: text.Text, tokenizer: Tokenizer, kind: np.dtype, origin: str, exact: bool
) -> Iterator[bytes]:
    if len(data) > _LONG:
        _log.warning("tokenising %.0f MB of %r, which is done once", len(data) / 1e6, origin)
    chunks = _chunks(data, origin)
    while together := list(itertools.islice(chunks, _AT_ONCE)):
        # The space that such a tokenizer puts there stands for the one of the text.
        given = [c.removeprefix(" ") for c in together] if tokenizer.leads else together
        try:
            found = tokenizer.encode(given)
        except Exception as error:  # whatever the library raises
            raise UserError(
                f"text {origin!r} cannot be tokenised by {tokenizer.origin!r} ({first_line(error)})"
            ) from None
        for chunk, tokens in zip(together, found, strict=True):
            if exact:
                _check_complete(chunk, tokens, tokenizer, origin)
            yield tokens.astype(kind).tobytes()


def _check_complete(chunk: str, tokens: np.ndarray, tokenizer: Tokenizer, origin: str) -> None:
    """UserError unless the tokens stand for all bytes of the chunk, and for no others."""
    size, counted = len(chunk.encode()), int(tokenizer.sizes[tokens].sum())
    if counted - size not in (0, int(tokenizer.leads)):
        raise UserError(
            f"text {origin!r}: its tokens by {tokenizer.origin!r} stand for {counted:,} bytes, and "
            f"the text has {size:,} there (it begins {chunk[:40]!r}), so bits per byte would be "
            "wrong; the tokenizer lacks some characters, or changes the text: normalise the text "
            "as it does (often NFC)"
        )


def _chunks(data: text.Text, origin: str) -> Iterator[str]:
    """The text in pieces of about `_CHUNK` bytes.

    A character that is cut off at the start or at the end of the text is left out: a share of a
    file may begin and end anywhere.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    begin = next((at for at in range(min(3, len(data))) if data[at] & 0xC0 != 0x80), 0)
    rest = ""
    for start in range(begin, len(data), _CHUNK):
        try:
            rest += decoder.decode(data[start : start + _CHUNK].tobytes())
        except UnicodeDecodeError as error:
            raise UserError(
                f"text {origin!r}: not UTF-8 near byte {start + error.start:,}; convert it, for "
                "example with iconv"
            ) from None
        end = _end(rest)
        yield rest[:end]
        rest = rest[end:]
    if rest:
        yield rest


def _end(chunk: str) -> int:
    """Where to end a chunk: before the last space between two letters, else at its end."""
    for at in range(len(chunk) - 2, max(0, len(chunk) - _SEARCHED), -1):
        if chunk[at] == " " and chunk[at - 1].isalpha() and chunk[at + 1].isalpha():
            return at
    return len(chunk)


def load_array(path: Path, key: str, vocabulary: int) -> Array:
    """The tokens of an .npy file, memory-mapped; UserError if they are none of the vocabulary."""
    try:
        open_plain(path).close()
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise UserError(f"{key} = {str(path)!r}: no such file") from None
    except UNREADABLE as error:
        raise UserError(
            f"{key} = {str(path)!r}: not a readable .npy file ({first_line(error)})"
        ) from None
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in "iu":
        shape = getattr(array, "shape", None)
        raise UserError(
            f"{key} = {str(path)!r}: must be one row of whole numbers, the tokens; it is "
            f"{getattr(array, 'dtype', type(array).__name__)} of shape {shape}"
        )
    for part in np.array_split(array, 1 + len(array) // 2**24):
        for value in (part.min(), part.max()) if len(part) else ():
            if not 0 <= value < vocabulary:
                raise UserError(
                    f"{key} = {str(path)!r}: holds the token {value}; the vocabulary has 0 to "
                    f"{vocabulary - 1}"
                )
    return array
