"""Small texts as files of every kind: plain, compressed, PG-19."""

import gzip
import lzma
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

PROSE = (
    b"The quick brown fox jumps over the lazy dog, \xc3\xa9t\xc3\xa9 after \xc3\xa9t\xc3\xa9.\n"
    * 20
)


def write(path: Path, data: bytes = PROSE) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    opener: Callable[..., Any] = {".xz": lzma.open, ".gz": gzip.open}.get(path.suffix, open)
    with opener(path, "wb") as file:
        file.write(data)
    return path


def fake_datasets(monkeypatch: pytest.MonkeyPatch, books: Callable[[str], Iterator[Any]]) -> None:
    module = types.ModuleType("datasets")
    module.load_dataset = lambda name, split, streaming: books(split)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
