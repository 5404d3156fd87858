"""Damaged files of other libraries: pretrained models, and the tokenizers that come with them.

Blind damage changes bytes. Knowing damage gives a valid file with an impossible content: counts
that no file has, false shapes, values of the wrong type.
"""

import hashlib
import json
import random
import struct
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gaugelasso import UserError, import_model
from gaugelasso.files.tokenizer import end_token, load_tokenizer
from gaugelasso.importing import open_source
from tests.importing import sources
from tests.importing.bases import tiny_gguf, tokenizer_metadata
from tests.tasks.tokenizers import byte_level, save, with_fallback
from tests.trust import damage

# Bytes that reading any of them may take; the models have a few hundred kilobytes.
MOST_MEMORY = 2**26
Damages = Iterator[tuple[str, damage.Bytes]]
Damaged = Iterator[tuple[str, bytes]]


@dataclass(frozen=True)
class Specimen:
    """An intact file of one kind, and what reads it.

    `make` writes it into a folder, with all that belongs to it, and returns its path. `read` gets
    that path. `damage` yields changes of the content: `often` of each random kind. `least` are the
    distinct damaged files that `often` makes in the tests, and `share` of them must be refused.
    """

    kind: str
    name: str
    make: Callable[[Path], Path]
    read: Callable[[Path], object]
    damage: Callable[[bytes, random.Random, int], Damages]
    often: int
    least: int
    share: float

    def __str__(self) -> str:
        return f"{self.kind}, {self.name}"

    def damaged(self, data: bytes, often: int) -> Damaged:
        """Yield damaged contents by name: all of them differ, also from the intact one."""
        seen = {hashlib.sha256(data).digest()}
        for name, change in self.damage(data, random.Random(str(self)), often):
            changed = change(data)
            digest = hashlib.sha256(changed).digest()
            if digest not in seen:
                seen.add(digest)
                yield name, changed


def met(path: Path, data: bytes, read: Callable[[Path], object]) -> str:
    """`refused` or `read`; anything else is a fault."""
    path.write_bytes(data)
    try:
        read(path)
    except UserError as error:
        message = str(error)
        if str(path.parent) not in message or len(message.splitlines()) != 1 or len(message) > 1000:
            return f"not a line that names the file: {message[:200]}"
        return "refused"
    except Exception as error:  # any other exception is a fault
        return f"{type(error).__name__}: {error}"
    return "read"


# --- damages ---------------------------------------------------------------------------------


def numbers(size: int, chance: random.Random, often: int) -> Damages:
    """Yield changes that overwrite eight bytes with a count that no file has."""
    for _ in range(often):
        at, number = chance.randrange(size - 8), chance.choice([2**62, 2**40, 2**31, 2**16, 0])
        count = struct.pack("<Q", number)
        yield f"{number} at {at}", lambda data, at=at, c=count: data[:at] + c + data[at + 8 :]


def _of_json(leaves_per_often: float) -> Callable[[bytes, random.Random, int], Damages]:
    def damages(data: bytes, chance: random.Random, often: int) -> Damages:
        yield from damage.blind(len(data), chance, often)
        most = int(leaves_per_often * often)
        yield from damage.knowing_json(json.loads(data), chance, most, counts=True)

    return damages


def _of_safetensors(data: bytes, chance: random.Random, often: int) -> Damages:
    header = 8 + int.from_bytes(data[:8], "little")
    yield from damage.blind(header, chance, often)
    yield from numbers(header, chance, often)
    yield from damage.knowing_tensors(data, chance, most=often // 6)


# Any float32 of the tensors is valid, and a flipped bit is none to find.
def _of_gguf(data: bytes, chance: random.Random, often: int) -> Damages:
    header = data.rindex(b".weight") + 64
    yield from damage.blind(header, chance, often)
    yield from numbers(header, chance, often)


def _of_gguf_tokenizer(data: bytes, chance: random.Random, often: int) -> Damages:
    first, last = data.index(b"tokenizer.ggml.model"), data.index(b"attn_norm")

    def within(change: damage.Bytes) -> damage.Bytes:
        return lambda data: data[:first] + change(data[first:last]) + data[last:]

    for damages in (damage.blind, numbers):
        for name, change in damages(last - first, chance, often):
            yield name, within(change)


def _of_gguf_content(model: Callable[[], Any]) -> Callable[[bytes, random.Random, int], Damages]:
    """Files whose keys, names and shapes are written as any others, and wrong."""

    def damages(data: bytes, chance: random.Random, often: int) -> Damages:
        settings, tensors = sources.metadata(model()), sources.gguf_tensors(model())
        wrong = {"0": 0, "huge": 2**32 - 1, "NaN": float("nan"), "text": "x", "list": [1, 2]}
        files: list[tuple[str, Any, Any]] = []
        for key in settings:
            files += [
                (f"{key} = {name}", settings | {key: v}, tensors) for name, v in wrong.items()
            ]
            files.append((f"{key} missing", _without(settings, key), tensors))
        for name in chance.sample([*tensors], min(often // 6, len(tensors))):
            rest, values = _without(tensors, name), tensors[name]
            for how, other in {
                "missing": rest,
                "renamed": rest | {f"../{name}": values},
                "flat": tensors | {name: values.reshape(-1)},
                "one more dim": tensors | {name: values[None]},
                "half": tensors | {name: values[: len(values) // 2]},
                "NaN": tensors | {name: values * float("nan")},
            }.items():
                files.append((f"{name} {how}", settings, other))
        with tempfile.TemporaryDirectory() as home:
            path = Path(home) / "m.gguf"
            for name, keys, held in files:
                sources.write_gguf(path, keys, held)
                changed = path.read_bytes()
                yield name, lambda _, changed=changed: changed

    return damages


def _without(table: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in table.items() if name != key}


# --- files -----------------------------------------------------------------------------------

WINDOWS: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": sources.llama,
    "gpt2": sources.gpt2,
    "bert": sources.bert,
    "vit": sources.vit,
    "mistral": lambda: sources.mistral(sliding_window=6),
    "qwen3": lambda: sources.qwen3(**WINDOWS),
}


def _folder(file: str, model: Callable[[], Any], **options: Any) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        model().save_pretrained(folder, **options)
        return folder / file

    return make


def _gguf(model: Callable[[], Any]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        found, path = model(), folder / "m.gguf"
        sources.write_gguf(path, sources.metadata(found), sources.gguf_tensors(found))
        return path

    return make


def _gguf_with_tokenizer(folder: Path) -> Path:
    return tiny_gguf(folder / "m.gguf", tokenizer_metadata(byte_level()))


def _tokenizer(tokenizer: Callable[[], Any]) -> Callable[[Path], Path]:
    return lambda folder: save(tokenizer(), folder / "tokenizer.json")


def _tokenizer_settings(folder: Path) -> Path:
    save(byte_level(), folder / "tokenizer.json")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 64,
        "padding_side": "left", "clean_up_tokenization_spaces": False, "chat_template": "{{ m }}",
        "eos_token": {"content": "<|end|>", "special": True}, "bos_token": "<|end|>",
        "added_tokens_decoder": {"299": {"content": "<|end|>", "lstrip": False, "special": True}},
    }  # fmt: skip
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(settings, indent=1))
    return path


def _read_folder(path: Path) -> object:
    return import_model(path.parent)


def _read_tokenizer(path: Path) -> object:
    found = load_tokenizer(path)
    return found.pieces, found.encode(["The fox, été."])


def _read_end(path: Path) -> object:
    return end_token(load_tokenizer(path.with_name("tokenizer.json")), path.parent)


def _specimens() -> Iterator[Specimen]:
    for name, model in FAMILIES.items():
        made = _folder("model.safetensors", model)
        yield Specimen("safetensors", name, made, _read_folder, _of_safetensors, 12, 84, share=0.9)
        made = _folder("config.json", model)
        yield Specimen("config.json", name, made, _read_folder, _of_json(0.5), 14, 84, share=0.4)
    made = _folder("model.safetensors.index.json", sources.llama, max_shard_size="60KB")
    yield Specimen("shard index", "llama", made, _read_folder, _of_json(0.5), 120, 500, share=0.5)
    for name in ("llama", "qwen3"):
        made = _gguf(FAMILIES[name])
        yield Specimen("GGUF", f"{name}, bytes", made, import_model, _of_gguf, 40, 150, share=0.5)
        content = _of_gguf_content(FAMILIES[name])
        yield Specimen("GGUF", f"{name}, content", made, import_model, content, 40, 100, share=0.5)
    yield Specimen(
        "tokenizer in GGUF",
        "byte level",
        _gguf_with_tokenizer,
        lambda path: open_source(path).tokenizer(),
        _of_gguf_tokenizer,
        130,
        500,
        share=0.3,
    )
    for name, tokenizer in (("byte level", byte_level), ("byte fallback", with_fallback)):
        made = _tokenizer(tokenizer)
        yield Specimen(
            "tokenizer.json", name, made, _read_tokenizer, _of_json(0.25), 60, 250, share=0.3
        )
    yield Specimen(
        "tokenizer_config.json",
        "byte level",
        _tokenizer_settings,
        _read_end,
        _of_json(0.1),
        180,
        500,
        share=0.3,
    )


SPECIMENS = tuple(_specimens())
