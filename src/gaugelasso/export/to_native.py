"""The native form: safetensors and a structure, which `gaugelasso.inference.load` reads."""

from pathlib import Path

import torch

from gaugelasso.export.comparison import Comparison, Say
from gaugelasso.export.source import Source
from gaugelasso.inference import load
from gaugelasso.inference.stored import WEIGHTS, save


def write_native(source: Source, folder: Path, dtype: torch.dtype, device: str, say: Say) -> float:
    """Write the files, load them again, and return the largest deviation."""
    save(source.model, folder, dtype)
    return Comparison(source, dtype, say).check(WEIGHTS, whole=load(folder))
