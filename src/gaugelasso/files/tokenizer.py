"""Tokenizers: a tokenizer.json read as data, and the bytes of text that each token stands for.

The bytes of a token are known of byte-level tokenizers and of those with byte fallback. Needs the
package tokenizers, which a plain installation does not bring.
"""

import functools
import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gaugelasso.errors import UserError, first_line
from gaugelasso.files.untrusted import read_json, read_plain

NAME = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
# What a run keeps of a tokenizer, and what a folder may hold of it; copied as data.
SPECIAL = "special_tokens_map.json"
KEPT = (NAME, SETTINGS, SPECIAL, "chat_template.jinja")
FILES = (*KEPT, "tokenizer.model", "added_tokens.json", "vocab.json", "merges.txt")
# Bytes of such a file, and tokens: several times what the largest vocabularies need.
_LARGEST, _MOST_TOKENS = 2**27, 2**22
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"  # what tokenizers with byte fallback write for a space


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer, the content of its file, and where it was read from."""

    origin: str
    data: bytes
    inner: Any

    @functools.cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @functools.cached_property
    def pieces(self) -> list[bytes]:
        """The bytes of text that each token stands for; none for a number without a token."""
        return _pieces(self.inner, self.size, self.origin)

    @functools.cached_property
    def sizes(self) -> np.ndarray:
        """The number of bytes of each token."""
        return np.array([len(piece) for piece in self.pieces], dtype=np.int64)

    @functools.cached_property
    def size(self) -> int:
        """One more than the largest number of a token."""
        size = 1 + max(self.inner.get_vocab(with_added_tokens=True).values(), default=-1)
        if not 0 < size <= _MOST_TOKENS:
            raise UserError(
                f"{self.origin!r}: its largest token is {size - 1}; 0 to {_MOST_TOKENS - 1} are "
                "read"
            )
        return size

    @functools.cached_property
    def leads(self) -> bool:
        """Whether it puts a space before a text; taken not to, where that cannot be told."""
        return _knows_bytes(self.inner) and int(self.sizes[self.encode(["a"])[0]].sum()) == 2

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """The tokens of each text, without tokens that begin or end it."""
        # Does not track where in the text a token is, as `encode_batch` does.
        found = self.inner.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(each.ids, dtype=np.int64) for each in found]

    def decode(self, tokens: Iterable[int]) -> Iterator[int]:
        """The bytes of the tokens, one after the other."""
        return (byte for token in tokens for byte in self._piece(token))

    def _piece(self, token: int) -> bytes:
        # A vocabulary may be larger than its tokenizer.
        return self.pieces[token] if token < self.size else b""

    def check_fits(self, vocabulary: int, what: str) -> None:
        """UserError if it has tokens that a vocabulary of this size lacks."""
        if self.size > vocabulary:
            raise UserError(
                f"{self.origin!r}: the highest token of the tokenizer is {self.size - 1}, and "
                f"{what} has the tokens 0 to {vocabulary - 1}; give the tokenizer of that model"
            )


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a tokenizer.json, or of a folder with one; UserError names the file."""
    file = path / NAME if path.is_dir() else path
    try:
        data = read_plain(file, _LARGEST)
    except FileNotFoundError:
        raise UserError(
            f"tokenizer {str(file)!r}: no such file; give a {NAME}, or a folder with one"
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(f"tokenizer {str(file)!r}: cannot be read ({first_line(error)})") from None
    return parse_tokenizer(data, str(file))


def parse_tokenizer(data: bytes, origin: str) -> Tokenizer:
    """The tokenizer with this content of a tokenizer.json; `origin` names it in errors."""
    library = tokenizers_library()
    try:
        inner = library.Tokenizer.from_buffer(data)
        inner.no_truncation()
        inner.no_padding()
    except (KeyboardInterrupt, SystemExit):
        raise
    # A panic of the library derives from BaseException alone.
    except BaseException as error:
        raise UserError(f"{origin!r}: not a readable tokenizer ({first_line(error)})") from None
    return Tokenizer(origin, data, inner)


def tokenizers_library() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise UserError(
            "a tokenizer needs the package tokenizers: pip install 'gaugelasso[tokens]'"
        ) from None
    return tokenizers


def read_files(folder: Path, names: Collection[str] = KEPT) -> dict[str, bytes]:
    """The files of a tokenizer that a folder has, by name; they are not parsed."""
    found = {}
    for name in names:
        if (folder / name).exists():
            try:
                found[name] = read_plain(folder / name, _LARGEST)
            except (OSError, ValueError) as error:
                raise UserError(
                    f"{str(folder / name)!r}: cannot be read ({first_line(error)})"
                ) from None
    return found


def token_settings(folder: Path, name: str = SETTINGS) -> dict[str, Any]:
    """The settings beside a tokenizer; empty if there are none."""
    path = folder / name
    try:
        settings = read_json(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{str(path)!r}: not a readable JSON file ({first_line(error)})") from None
    return settings if isinstance(settings, dict) else {}


def named_token(tokenizer: Tokenizer, folder: Path, name: str) -> int | None:
    """The token that the settings beside the tokenizer name, as `eos_token`; None without one."""
    for file in (SETTINGS, SPECIAL):
        named = token_settings(folder, file).get(name)
        content = named.get("content") if isinstance(named, dict) else named
        found = tokenizer.inner.token_to_id(content) if isinstance(content, str) else None
        if isinstance(found, int):
            return found
    return None


def end_token(tokenizer: Tokenizer, folder: Path) -> int | None:
    """The token that ends a text."""
    return named_token(tokenizer, folder, "eos_token")


def special_token(tokenizer: Tokenizer, place: Path, name: str, *usual: str) -> int | None:
    """The token that settings in the folder `place` name, else one that is usually named so.

    A `place` that is a file has no settings.
    """
    named = named_token(tokenizer, place, name) if place.is_dir() else None
    numbers = [named, *(tokenizer.inner.token_to_id(content) for content in usual)]
    return next((number for number in numbers if number is not None), None)


def byte_names() -> list[str]:
    """The characters by which tokenizers name bytes: those that print stand for themselves."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    number = {byte: byte for byte in printable} | {b: 256 + k for k, b in enumerate(others)}
    return [chr(number[byte]) for byte in range(256)]


def _pieces(inner: Any, size: int, origin: str) -> list[bytes]:
    as_bytes = _converter(inner, origin)
    pieces = [b""] * size
    for token, number in inner.get_vocab(with_added_tokens=True).items():
        pieces[number] = as_bytes(token)
    # Added tokens are found in the text as they are.
    for number, token in inner.get_added_tokens_decoder().items():
        pieces[number] = token.content.encode()
    return pieces


def _converter(inner: Any, origin: str) -> Callable[[str], bytes]:
    """From the name of a token to the bytes that it stands for."""
    kinds = _kinds(inner)
    if "ByteLevel" in kinds:
        byte_of = {name: byte for byte, name in enumerate(byte_names())}
        return lambda token: bytes(byte_of[c] for c in token if c in byte_of)
    if "ByteFallback" in kinds:
        return _with_fallback
    raise UserError(
        f"{origin!r}: neither a byte-level tokenizer nor one with byte fallback, so the bytes that "
        "a token stands for are not known"
    )


def _kinds(inner: Any) -> set[str]:
    """The kinds of decoders that it has."""
    return set(_decoders(json.loads(inner.decoder.__getstate__()))) if inner.decoder else set()


def _knows_bytes(inner: Any) -> bool:
    return bool(_kinds(inner) & {"ByteLevel", "ByteFallback"})


def _with_fallback(token: str) -> bytes:
    byte = _BYTE.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(_SPACE, " ").encode()


def _decoders(state: dict[str, Any]) -> Iterator[str]:
    yield state.get("type", "")
    for inner in state.get("decoders", []):
        yield from _decoders(inner)
