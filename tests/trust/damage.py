"""Ways to damage a file: blindly, byte by byte, and knowingly, by changing its meaning.

A blind change leaves the manifest as it was. After a knowing change the manifest is written again
to match, so that the file must be refused because of its content.
"""

import copy
import io
import json
import os
import pickle
import random
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Bytes = Callable[[bytes], bytes]
CANARY = "canary"


class Bomb:
    """When unpickled, it runs a command that creates a file."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {CANARY}",)


def zipped() -> bytes:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as archive:
        archive.writestr("data.pkl", pickle.dumps(Bomb()))
    return held.getvalue()


# --- blindly ------------------------------------------------------------------------------


def blind(size: int, chance: random.Random, often: int) -> Iterator[tuple[str, Bytes]]:
    """Yield changes of a file of this many bytes; each changes at least one bit."""
    for _ in range(often):
        at = chance.randrange(size)
        yield f"cut at {at}", lambda data, at=at: data[:at]
        bit = chance.randrange(8 * size)
        yield f"bit {bit} flipped", lambda data, bit=bit: _flipped(data, bit)
        start = chance.randrange(size)
        yield f"block at {start} lost", lambda data, start=start: _lost(data, start)
    yield "empty", lambda data: b""
    yield "longer", lambda data: data + b"\0"
    yield "twice", lambda data: data + data
    yield "a pickle", lambda data: pickle.dumps(Bomb())
    yield "an archive before it", lambda data: zipped() + data
    yield "an archive after it", lambda data: data + zipped()


def _flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def _lost(data: bytes, start: int) -> bytes:
    """Zero a block, as if the length of the file reached the disk before its content."""
    end = min(start + 512, len(data))
    changed = data[:start] + bytes(end - start) + data[end:]
    return changed if changed != data else _flipped(data, 8 * start)


def strange(path: Path) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield what may be in the place of a file without being a regular file."""
    yield "missing", lambda: None
    yield "a folder", path.mkdir
    yield "a pipe", lambda: os.mkfifo(path)
    yield "a link to itself", lambda: path.symlink_to(path.name)
    yield "a link without an end", lambda: path.symlink_to("/dev/zero")
    yield "a link to a good one", lambda: path.symlink_to(path.with_name(path.name + ".good"))


# --- JSON, knowingly ------------------------------------------------------------------------

_NO_NUMBERS = {"NaN": "NaN", "Infinity": "Infinity", "too large": "1e999", "minus": "-Infinity"}
_MARK = "@@"


def leaves(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(data, dict | list) and data:
        items = data.items() if isinstance(data, dict) else enumerate(data)
        for key, value in items:
            yield from leaves(value, (*path, key))
    else:
        yield path, data


def knowing_json(
    data: Any, chance: random.Random, most: int, counts: bool
) -> Iterator[tuple[str, Bytes]]:
    """Yield valid JSON files with impossible values, for at most `most` of the leaves.

    `counts`: the integers are counts; other figures may have any value.
    """
    found = list(leaves(data))
    for path, value in chance.sample(found, min(most, len(found))):
        where = ".".join(map(str, path))
        for kind, wrong in _wrong(value, counts):
            yield f"{where} = {kind}", _text(_with(data, path, wrong))
        yield f"{where} missing", _text(_without(data, path))
    yield "an unknown key", _text({**data, "stranger": 1})
    key = next(iter(data))
    whole = json.dumps(data)
    twice = f"{{{json.dumps(key)}: {json.dumps(data[key])}, " + whole[1:]
    yield "a key twice", lambda _: twice.encode()
    for depth in (1_000, 100_000):
        yield f"{depth} lists in lists", lambda _, n=depth: b"[" * n + b"]" * n
    yield "5000 digits", lambda _: b'{"steps": ' + b"9" * 5000 + b"}"
    for name, text in {"a list": "[]", "a number": "3", "a word": '"x"', "nothing": "null"}.items():
        yield name, lambda _, text=text: text.encode()
    yield "Latin-1", lambda _: whole.replace('"', '"é', 1).encode("latin-1")
    yield "UTF-16", lambda _: whole.encode("utf-16")


def _wrong(value: Any, counts: bool) -> Iterator[tuple[str, Any]]:
    yield "a mapping", {"x": 1}
    if isinstance(value, bool):
        yield "a number", 3
    elif isinstance(value, int | float):
        yield "a word", "many"
        yield "true", True
        for kind, text in _NO_NUMBERS.items():
            yield kind, _MARK + text
        if isinstance(value, int):
            yield "beyond a float", 10**400
            if counts:
                yield "negative", -1
                yield "giant", 10**30
                yield "a fraction", 1.5
    elif isinstance(value, str):
        yield "a number", 3
        yield "nothing", None
        yield "a way out", "../../../etc/passwd"
    else:
        yield "a word", "many"


def _with(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    changed = copy.deepcopy(data)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return changed


def _without(data: Any, path: tuple[Any, ...]) -> Any:
    changed = copy.deepcopy(data)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    return changed


def _text(data: Any) -> Bytes:
    text = json.dumps(data)
    for literal in _NO_NUMBERS.values():
        text = text.replace(f'"{_MARK}{literal}"', literal)
    return lambda _: text.encode()


# --- safetensors, knowingly -------------------------------------------------------------------


def knowing_tensors(data: bytes, chance: random.Random, most: int) -> Iterator[tuple[str, Bytes]]:
    """Yield safetensors files with a false header, for at most `most` of the tensors."""
    length = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    names = [name for name in header if name != "__metadata__"]
    for name in chance.sample(names, min(most, len(names))):
        entry, other = header[name], header[names[names.index(name) - 1]]
        start, end = entry["data_offsets"]
        changes: dict[str, dict[str, Any]] = {
            "giant": {"shape": [2**40]},
            "giant product": {"shape": [2**32, 2**32]},
            "of negative shape": {"shape": [-1, *entry["shape"]]},
            "of another dtype": {"dtype": "F64" if entry["dtype"] != "F64" else "F32"},
            "of no dtype": {"dtype": "PICKLE"},
            "one longer": {"shape": [*entry["shape"][:-1], (entry["shape"] or [1])[-1] + 1]},
            "over another": {"data_offsets": other["data_offsets"]},
            "beyond the file": {"data_offsets": [start, end + 2**40]},
            "backwards": {"data_offsets": [end + 1, start]},
            "at a negative place": {"data_offsets": [-8, end]},
        }
        for kind, change in changes.items():
            if (end > start and len(names) > 1) or kind != "over another":
                yield f"{name} {kind}", _packed({**header, name: {**entry, **change}}, body)
        rest = {key: value for key, value in header.items() if key != name}
        yield f"{name} missing", _packed(rest, body)
        yield f"{name} renamed", _packed({**rest, f"../{name}": entry}, body)
        text = json.dumps(header)
        twice = f"{{{json.dumps(name)}: {json.dumps(entry)}, " + text[1:]
        yield f"{name} twice", _raw(twice.encode(), body)
        if entry["dtype"] == "F32" and end > start:
            nan = body[:start] + b"\0\0\xc0\x7f" + body[start + 4 :]
            yield f"{name} holds a NaN", _packed(header, nan)
    for kind, number in {
        "none": 0,
        "short": length - 1,
        "of all": len(data),
        "giant": 2**63,
    }.items():
        yield f"header length {kind}", lambda _, n=number: n.to_bytes(8, "little") + data[8:]
    yield "no header", _raw(b"{}", body)
    yield "a header that is a list", _raw(b"[]", body)
    yield "deep header", _raw(b"[" * 100_000, body)
    yield "a hole", _packed(header, body + bytes(8))


def _packed(header: Any, body: bytes) -> Bytes:
    return _raw(json.dumps(header).encode(), body)


def _raw(text: bytes, body: bytes) -> Bytes:
    return lambda _: len(text).to_bytes(8, "little") + text + body
