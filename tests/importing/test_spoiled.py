"""Spoiled files: each is refused in one line that names it, or is still a valid model.

`make torture` tries seven times as many, and detects whether code in them is run.
"""

import os
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from gaugelasso import UserError, import_model
from tests.importing.sources import gguf_tensors, llama, metadata, write_gguf
from tests.trust.foreign import FAMILIES, MOST_MEMORY, SPECIMENS, Specimen, met
from tests.trust.memory import Peak


@pytest.mark.parametrize("specimen", SPECIMENS, ids=str)
def test_spoiled_files(specimen: Specimen, tmp_path: Path) -> None:
    path = specimen.make(tmp_path)
    data = path.read_bytes()
    specimen.read(path)
    with Peak() as peak:
        found = [
            (name, met(path, content, specimen.read))
            for name, content in specimen.damaged(data, specimen.often)
        ]
    assert len(found) >= specimen.least
    assert [each for each in found if each[1] not in ("refused", "read")] == []
    refused = [name for name, end in found if end == "refused"]
    assert len(refused) > specimen.share * len(found)
    assert peak.bytes < MOST_MEMORY
    path.write_bytes(data)
    specimen.read(path)


def test_500_files_of_each_kind_are_spoiled() -> None:
    least: Counter[str] = Counter()
    for specimen in SPECIMENS:
        least[specimen.kind] += specimen.least
    assert len(least) == 7
    assert min(least.values()) >= 500


@pytest.fixture(params=FAMILIES.values(), ids=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    request.param().save_pretrained(tmp_path)
    return tmp_path


def key(kind: int, rest: bytes) -> bytes:
    """A GGUF file with one key of a type, and what follows."""
    start = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k"
    return start + struct.pack("<I", kind) + rest


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b"GGUF", "ends inside its header"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**40, 0), "1,099,511,627,776 tensors are too many"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**40), "1,099,511,627,776 keys are too many"),
        (key(8, struct.pack("<Q", 2**23)), "ends inside its header"),
        (key(8, struct.pack("<Q", 2**60)), "too long"),
        (key(9, struct.pack("<IQ", 4, 2**60)), "ends inside its header"),
        (key(9, struct.pack("<IQ", 8, 2**60)), "of type 8 is not read"),
        (key(9, struct.pack("<IQ", 9, 1)), "of type 9 is not read"),
        (key(13, b""), "unknown type 13"),
    ],
)
def test_a_count_is_compared_with_the_file(data: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with Peak() as peak, pytest.raises(UserError, match=reason):
        import_model(path)
    assert peak.bytes < MOST_MEMORY


def test_tensors_that_share_their_bytes_are_refused(tmp_path: Path) -> None:
    model, path = llama(), tmp_path / "m.gguf"
    tensors = gguf_tensors(model)
    write_gguf(path, metadata(model), tensors)
    # All bytes of the last tensor are gone, and its entry points to those of the first.
    data, size = path.read_bytes(), tensors["output.weight"].nbytes
    name = b"output.weight"
    at = data.index(name) + len(name) + struct.calcsize("<IQQI")
    path.write_bytes(data[:at] + bytes(8) + data[at + 8 : -size])
    with pytest.raises(UserError, match="too short for its tensors"):
        import_model(path)


def _endless(path: Path) -> None:
    with path.open("wb") as file:
        file.write((2**33 - 8).to_bytes(8, "little"))
        file.truncate(2**33)  # a sparse file: it takes no disk space


SPOILED: dict[str, Callable[[Path], None]] = {"pipe": os.mkfifo, "endless": _endless}


@pytest.mark.parametrize("kind", SPOILED)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_no_reader_waits_or_reads_without_end(kind: str, name: str, folder: Path) -> None:
    (folder / name).unlink()
    SPOILED[kind](folder / name)
    with Peak() as peak, pytest.raises(UserError, match=name):
        import_model(folder)
    assert peak.bytes < MOST_MEMORY
