"""Small images as encoded bytes and packed files."""

import io
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from gaugelasso.tasks import MaskedAutoencoder, images


def pictures(count: int, seed: int = 0, size: int = 12) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, size, size, 3), dtype=np.uint8)


def encoded(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG")
    return buffer.getvalue()


def pack(path: Path, **parts: list[bytes]) -> Path:
    arrays = {}
    for part, members in parts.items():
        arrays[f"{part}_data"] = np.frombuffer(b"".join(members), dtype=np.uint8)
        arrays[f"{part}_offsets"] = np.cumsum([0, *map(len, members)])
    np.savez(path, **arrays)
    return path


def packed(folder: Path, train: int = 5, valid: int = 3) -> Path:
    members = {"train": pictures(train), "valid": pictures(valid, seed=1)}
    return pack(
        folder / "faces.npz", **{part: [encoded(p) for p in m] for part, m in members.items()}
    )


def seen(task: MaskedAutoencoder, targets: torch.Tensor) -> np.ndarray:
    """The images of targets, as uint8."""
    data = images.load(task.path, task.size)
    pixels = task.join(targets[..., :-1]) * torch.tensor(data.std) + torch.tensor(data.mean)
    return (pixels * 255).round().byte().numpy()
