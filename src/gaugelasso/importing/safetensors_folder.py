"""Reads a Hugging Face folder: config.json, and weights as safetensors, in one file or in shards.

Runs no code of the folder. Pickled weights, models with code of their own (`auto_map`) and
quantised weights are refused by name.
"""

import os
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from gaugelasso.errors import UserError, first_line
from gaugelasso.files.tensors import read_tensors
from gaugelasso.files.tokenizer import FILES, read_files
from gaugelasso.files.untrusted import open_plain, parse_light
from gaugelasso.importing.source import MASKS, PLACES, Settings, Source
from gaugelasso.runs.reading import exists, read_json

CONFIG = "config.json"
_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
# Bytes of a header: hundreds of times what the tensors of a large model need.
_LONGEST_HEADER = 2**24
_DTYPES = ("F64", "F32", "F16", "BF16")
# Of tensors that are no weights.
_OTHER_DTYPES = {**dict.fromkeys(MASKS, ("BOOL", "U8")), PLACES: ("I64",)}


def open_folder(folder: Path) -> Source:
    """The model of a folder, its tensors mapped from their files; UserError names a bad file."""
    path = folder / CONFIG
    if not exists(path):
        for name in ("run", "base"):
            if exists(folder / name / CONFIG):
                raise UserError(
                    f"{str(folder)!r} is a folder of gaugelasso compress; what there is of a model "
                    f"is in {str(folder / name)!r}, and needs no import"
                )
        raise UserError(
            f"{str(folder)!r} is not a Hugging Face folder: {CONFIG} is missing; for a GGUF model "
            "give the .gguf file itself"
        )
    config = read_json(path, finite=False)
    if not isinstance(config, dict):
        raise UserError(f"{str(path)!r}: not a config, it must be a JSON object")
    if config.get("model_type") == "gaugelasso":
        raise UserError(
            f"{str(folder)!r} is an export of gaugelasso for transformers; give the run folder "
            "that was exported"
        )
    if isinstance(config.get("task"), dict):
        raise UserError(
            f"{str(folder)!r} is a folder of gaugelasso already; eval, export and compress take it "
            "as it is, and so does model.from of a config"
        )
    settings = Settings(path, config)
    for key, what in (
        ("auto_map", "a model with code of its own"),
        ("quantization_config", "quantised weights"),
    ):
        settings.require(key, (), what)
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or [*map(type, architectures)] != [str]:
        raise settings.error("architectures", "must be a list with one name")
    tensors = _weights(folder)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    files = partial(read_files, folder, FILES)
    return Source(folder, architectures[0], settings, shapes, tensors.__getitem__, files)


def _weights(folder: Path) -> dict[str, Tensor]:
    if exists(folder / _WHOLE):
        return _read(folder / _WHOLE)
    if exists(folder / _INDEX):
        return _read_shards(folder / _INDEX)
    for name in _PICKLED:
        if exists(folder / name):
            raise UserError(
                f"{str(folder / name)!r}: pickled weights can run code and are not read; save the "
                "model as safetensors"
            )
    raise UserError(f"{str(folder)!r}: neither {_WHOLE} nor {_INDEX} is there")


def _read_shards(index: Path) -> dict[str, Tensor]:
    """The tensors of all files that an index names: just those that the index says they hold."""
    data = read_json(index)
    places: Any = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(places, dict) or not all(isinstance(v, str) for v in places.values()):
        raise UserError(f"{str(index)!r}: 'weight_map' must be a table from tensors to files")
    shards = sorted(set(places.values()))
    for shard in shards:
        # A path may lead out of the folder.
        if Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise UserError(f"{str(index)!r}: {shard[:60]!r} is not the name of a shard")
    tensors: dict[str, Tensor] = {}
    for shard in shards:
        path = index.with_name(shard)
        found = _read(path)
        named = {name for name, place in places.items() if place == shard}
        for name in sorted(named - found.keys()):
            raise UserError(
                f"{str(path)!r}: tensor {name[:100]!r}, which {_INDEX} names, is missing"
            )
        for name in sorted(found.keys() - named):
            raise UserError(f"{str(path)!r}: {_INDEX} does not name its tensor {name[:100]!r}")
        tensors |= found
    return tensors


def _read(path: Path) -> dict[str, Tensor]:
    """The tensors of one file. The header is checked before the library parses it."""
    try:
        with open_plain(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if length > min(size, _LONGEST_HEADER):
                raise ValueError(f"its header of {length:,} bytes is too long")
            header = parse_light(file.read(length))
    except FileNotFoundError:
        raise UserError(f"{str(path)!r}: no such file") from None
    # ValueError: no valid JSON. RecursionError: nested too deeply.
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{str(path)!r}: not a readable safetensors file ({first_line(error)})"
        ) from None
    for name, entry in header.items() if isinstance(header, dict) else ():
        dtype = entry.get("dtype") if isinstance(entry, dict) else None
        others = (kinds for end, kinds in _OTHER_DTYPES.items() if name.endswith(end))
        allowed = _DTYPES + next(others, ())
        if name != "__metadata__" and dtype not in allowed:
            raise UserError(
                f"{str(path)!r}: tensor {name[:60]!r} has the type {str(dtype)[:20]!r}; only "
                f"{', '.join(_DTYPES)} are imported"
            )
    return read_tensors(path)
