"""Spoiled files: each is refused in one line that names it, or is still a valid model."""

import os
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gaugelasso import UserError, import_model
from gaugelasso.files.tokenizer import load_tokenizer
from gaugelasso.importing import open_source
from tests.importing.bases import tiny_gguf, tokenizer_metadata
from tests.importing.sources import (
    bert,
    gguf_tensors,
    gpt2,
    llama,
    metadata,
    mistral,
    qwen3,
    vit,
    write_gguf,
)
from tests.tasks.tokenizers import byte_level, save
from tests.trust import damage
from tests.trust.memory import Peak

# The models of these tests have a few hundred kilobytes.
MOST_MEMORY = 2**26


def met(path: Path, folder: Path, data: bytes, read: Callable[[Path], object]) -> str:
    """`refused` or `read`; anything else is a fault."""
    path.write_bytes(data)
    try:
        read(folder)
    except UserError as error:
        message = str(error)
        if str(folder) not in message or len(message.splitlines()) != 1 or len(message) > 1000:
            return f"not a line that names the file: {message[:200]}"
        return "refused"
    except Exception as error:  # any other exception is a fault
        return f"{type(error).__name__}: {error}"
    return "read"


def numbers(size: int, chance: random.Random, often: int) -> Iterator[tuple[str, damage.Bytes]]:
    """Yield changes that overwrite eight bytes with a count that no file has."""
    for _ in range(often):
        at, number = chance.randrange(size - 8), chance.choice([2**62, 2**40, 2**31, 2**16, 0])
        count = struct.pack("<Q", number)
        yield f"{number} at {at}", lambda data, at=at, c=count: data[:at] + c + data[at + 8 :]


def check(
    path: Path,
    folder: Path,
    spoilings: list[tuple[str, damage.Bytes]],
    share: float,
    read: Callable[[Path], object] = import_model,
) -> None:
    data = path.read_bytes()
    read(folder)
    with Peak() as peak:
        found = {name: met(path, folder, spoil(data), read) for name, spoil in spoilings}
    path.write_bytes(data)
    assert len(found) > 100
    assert {name: end for name, end in found.items() if end not in ("refused", "read")} == {}
    assert [*found.values()].count("refused") > share * len(found)
    assert peak.bytes < MOST_MEMORY
    read(folder)


WINDOWS: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "gpt2": gpt2,
    "bert": bert,
    "vit": vit,
    "mistral": lambda: mistral(sliding_window=6),
    "qwen3": lambda: qwen3(**WINDOWS),
}


@pytest.fixture(params=FAMILIES.values(), ids=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    request.param().save_pretrained(tmp_path)
    return tmp_path


def test_spoiled_safetensors(folder: Path) -> None:
    path = folder / "model.safetensors"
    data, chance = path.read_bytes(), random.Random(1)
    header = 8 + int.from_bytes(data[:8], "little")
    spoilings = [
        *damage.blind(header, chance, often=20),
        *numbers(header, chance, often=20),
        *damage.knowing_tensors(data, chance, most=3),
    ]
    check(path, folder, spoilings, share=0.9)


def test_spoiled_configs(folder: Path) -> None:
    path, chance = folder / "config.json", random.Random(2)
    spoilings = [*damage.blind(path.stat().st_size, chance, often=40)]
    check(path, folder, spoilings, share=0.5)


def test_spoiled_indices(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path, max_shard_size="60KB")
    path, chance = tmp_path / "model.safetensors.index.json", random.Random(3)
    check(path, tmp_path, [*damage.blind(path.stat().st_size, chance, often=40)], share=0.5)


@pytest.mark.parametrize("family", [llama, qwen3])
def test_spoiled_gguf(family: Callable[[], Any], tmp_path: Path) -> None:
    model, path, chance = family(), tmp_path / "m.gguf", random.Random(4)
    tensors = gguf_tensors(model)
    write_gguf(path, metadata(model), tensors)
    header = path.stat().st_size - sum(tensor.nbytes for tensor in tensors.values())
    spoilings = [*damage.blind(header, chance, often=30), *numbers(header, chance, often=60)]
    check(path, path, spoilings, share=0.5)


def test_spoiled_tokenizers_of_gguf(tmp_path: Path) -> None:
    path, chance = tmp_path / "m.gguf", random.Random(5)
    tiny_gguf(path, tokenizer_metadata(byte_level()))
    data = path.read_bytes()
    first, last = data.index(b"tokenizer.ggml.model"), data.index(b"attn_norm")

    def within(spoil: damage.Bytes) -> damage.Bytes:
        return lambda data: data[:first] + spoil(data[first:last]) + data[last:]

    spoilings = [*damage.blind(last - first, chance, often=20)]
    spoilings += numbers(last - first, chance, often=50)
    spoilings = [(name, within(spoil)) for name, spoil in spoilings]
    check(path, path, spoilings, share=0.3, read=lambda path: open_source(path).tokenizer())


def test_spoiled_tokenizer_files(tmp_path: Path) -> None:
    path, chance = tmp_path / "tokenizer.json", random.Random(6)
    save(byte_level(), path)
    spoilings = [*damage.blind(path.stat().st_size, chance, often=60)]
    check(path, path, spoilings, share=0.2, read=lambda path: load_tokenizer(path).pieces)


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
