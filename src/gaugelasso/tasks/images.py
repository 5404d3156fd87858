"""Decoded images as memory-mapped uint8 arrays in a cache on disk.

Images are decoded once and stored with the colour statistics of the training part. Finds no
images itself (`image_sources` does), draws no batches and shows no pictures.
"""

import contextlib
import errno
import functools
import hashlib
import json
import logging
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gaugelasso.errors import UserError, first_line
from gaugelasso.files import durable
from gaugelasso.files.untrusted import UNREADABLE, open_plain, read_json
from gaugelasso.tasks import image_sources, stored
from gaugelasso.tasks.image_sources import CELEBA, PARTS, Source

__all__ = ["CELEBA", "PARTS", "Images", "load"]

_LAYOUT = 1  # version of the cache's layout; part of the cache folder's name
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Images:
    """[N, size, size, 3] uint8 for each part; mean and deviation of each colour in 0..1."""

    parts: Mapping[str, np.ndarray]
    mean: tuple[float, ...]
    std: tuple[float, ...]


@functools.lru_cache(maxsize=4)
def load(path: str, size: int) -> Images:
    """The images at `path`, from the cache or decoded into it; UserError if there are none."""
    source = image_sources.find(path, size)
    name = hashlib.sha256(json.dumps([_LAYOUT, size, source.identity]).encode()).hexdigest()[:24]
    folder = stored.cache_folder() / "images" / name
    cached = _read_cache(folder) if folder.exists() else None
    return cached or _make_cache(folder, source, size)


def _read_cache(folder: Path) -> Images | None:
    """The images in a cache folder; None, with a warning, if the folder is damaged."""
    try:
        about = read_json(folder / "about.json")
        parts = {}
        for part in PARTS:
            open_plain(folder / f"{part}.npy").close()
            parts[part] = np.load(folder / f"{part}.npy", mmap_mode="r")
            # Caches of earlier versions have no fingerprints.
            if "known" in about and about["known"][part] != stored.fingerprint(parts[part]):
                raise ValueError(f"{part}.npy is not as it was written")
        return Images(parts, tuple(about["mean"]), tuple(about["std"]))
    except (*UNREADABLE, RecursionError) as error:
        reason = first_line(error)
    _log.warning("warning: cache %r is damaged (%s); it is rebuilt", str(folder), reason)
    return None


def _make_cache(folder: Path, source: Source, size: int) -> Images:
    """Decode into a temporary folder and rename it, so that no run sees a partial cache.

    Several processes may do this at the same time. So a damaged cache is moved away, never
    emptied in place, and a new one is mapped before another process can move it.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Some network disks refuse to remove files that are still mapped. They are harmless.
        with tempfile.TemporaryDirectory(dir=folder.parent, ignore_cleanup_errors=True) as aside:
            with contextlib.suppress(FileNotFoundError):  # no old cache, or another moved it
                durable.rename(folder, Path(aside) / "damaged")
            made = Path(aside) / "images"
            _write(made, source, size)
            images = _read_cache(made)
            if images is None:
                raise UserError(
                    f"cache {str(folder)!r} is damaged right after it was written; check its disk"
                )
            try:
                durable.rename(made, folder)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                # Another process was faster. Mapping its files shares their pages.
                images = _read_cache(folder) or images
            return images
    except OSError as error:
        raise UserError(
            f"cannot write decoded images under {str(folder.parent)!r} "
            f"({error.strerror or error}); set GAUGELASSO_CACHE to a folder with free space"
        ) from None


def _write(folder: Path, source: Source, size: int) -> None:
    folder.mkdir()
    fingerprints = {}
    for part in PARTS:
        shape = (source.counts[part], size, size, 3)
        array = np.lib.format.open_memmap(
            folder / f"{part}.npy", mode="w+", dtype=np.uint8, shape=shape
        )
        for index, pixels in enumerate(source.images[part]):
            array[index] = pixels
        if part == "train":
            mean, std = _statistics(array)
        array.flush()
        fingerprints[part] = stored.fingerprint(array)
        durable.sync(folder / f"{part}.npy")
    about = json.dumps({"mean": mean, "std": std, "known": fingerprints})
    durable.write_new(folder / "about.json", [about.encode()])


def _statistics(array: np.ndarray) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each colour, from exact counts of its 256 values."""
    counts = np.zeros((3, 256), dtype=np.int64)
    for image in array:
        for colour in range(3):
            counts[colour] += np.bincount(image[..., colour].ravel(), minlength=256)
    values, shares = np.arange(256) / 255, counts / counts.sum(axis=1, keepdims=True)
    mean = shares @ values
    # The variance of images of a single colour is 0; pixels are divided by its root.
    std = np.sqrt((shares @ values**2 - mean**2).clip(min=1e-6))
    return mean.tolist(), std.tolist()
