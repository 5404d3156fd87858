"""Images for training, decoded once: from a packed file, a folder, or CelebA.

Kept as memory-mapped uint8 arrays in a cache on disk, with the colour statistics of the
training part. Every image must be square and of the size asked for: what to cut away from
an image is the user's to decide. Draws no batches and shows no picture.
"""

import functools
import hashlib
import io
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from gaugelasso.errors import UserError
from gaugelasso.strict import UNREADABLE, parse_json, read_arrays, read_plain

CELEBA = "celeba"
PARTS = ("train", "valid")
_SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp"}
# Of a folder that is not split: one image in so many is held out.
_ONE_IN = 16
# Of CelebA's aligned images, 178 x 218: the square around the face.
_CELEBA_SQUARE = (0, 20, 178, 198)
_LAYOUT = 1  # of the cache; another layout takes another number


@dataclass(frozen=True)
class Images:
    """[N, size, size, 3] uint8 for each part; mean and deviation of each colour in 0..1."""

    parts: Mapping[str, np.ndarray]
    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True)
class _Source:
    """What is to be decoded: `identity` changes when the images do."""

    identity: Any
    counts: Mapping[str, int]
    images: Mapping[str, Iterable[np.ndarray]]


@functools.lru_cache(maxsize=4)
def load(path: str, size: int) -> Images:
    """The images at `path`, from the cache or decoded into it; UserError says what is wrong."""
    source = _celeba(size) if path == CELEBA else _local(path, size)
    for part in PARTS:
        if not source.counts[part]:
            raise UserError(f"task.path = {path!r} has no images for {part}")
    name = hashlib.sha256(json.dumps([_LAYOUT, size, source.identity]).encode()).hexdigest()[:24]
    home = cache_folder() / "images" / name
    if not home.exists():
        _decode_into(home, source, size)
    try:
        about = parse_json(read_plain(home / "about.json"))
        parts = {part: np.load(home / f"{part}.npy", mmap_mode="r") for part in PARTS}
        return Images(parts, tuple(about["mean"]), tuple(about["std"]))
    except UNREADABLE as error:
        raise UserError(
            f"cache {str(home)!r} is damaged ({_first_line(error)}); remove it, and it is made anew"
        ) from None


def cache_folder() -> Path:
    """GAUGELASSO_CACHE, or the folder that the system keeps for such things."""
    if told := os.environ.get("GAUGELASSO_CACHE"):
        return Path(told)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gaugelasso"


def _decode_into(home: Path, source: _Source, size: int) -> None:
    """Write aside, then rename the whole folder: no run ever sees half of it."""
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home.parent) as aside:
            folder = Path(aside) / "images"
            folder.mkdir()
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
            about = json.dumps({"mean": mean, "std": std})
            (folder / "about.json").write_text(about, encoding="utf-8")
            if not home.exists():  # another run may have been faster
                folder.rename(home)
    except OSError as error:
        raise UserError(
            f"cannot keep decoded images under {str(home.parent)!r} ({error.strerror or error}); "
            "set GAUGELASSO_CACHE to a folder with room"
        ) from None


def _statistics(array: np.ndarray) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each colour, from exact counts of its 256 values."""
    counts = np.zeros((3, 256), dtype=np.int64)
    for image in array:
        for colour in range(3):
            counts[colour] += np.bincount(image[..., colour].ravel(), minlength=256)
    values, shares = np.arange(256) / 255, counts / counts.sum(axis=1, keepdims=True)
    mean = shares @ values
    # An image set of one colour has no deviation to divide by.
    std = np.sqrt((shares @ values**2 - mean**2).clip(min=1e-6))
    return mean.tolist(), std.tolist()


def _decode(name: str, file: Path | IO[bytes], size: int) -> np.ndarray:
    image = _pillow()
    try:
        with image.open(file) as opened:
            width, height = opened.size
            pixels = np.asarray(opened.convert("RGB")) if width == height == size else None
    except Exception as error:  # decoders raise what they like: OSError, SyntaxError, ...
        raise UserError(f"{name} is not a readable image ({_first_line(error)})") from None
    if pixels is None:
        raise UserError(
            f"{name} is {width}x{height} pixels, but task.size = {size} expects {size}x{size}; "
            "resize the images, or change task.size"
        )
    return pixels


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


# --- where images come from -------------------------------------------------------------


def _local(path: str, size: int) -> _Source:
    place = Path(path)
    if place.is_dir():
        return _folder(place, size)
    if not place.exists():
        raise UserError(
            f"task.path = {path!r}: no such file or folder; give a packed .npz, a folder of "
            f"images, 'generated' or {CELEBA!r}"
        )
    return _packed(place, size)


def _packed(path: Path, size: int) -> _Source:
    """Keys {train,valid}_{data,offsets}: image i is the bytes data[offsets[i]:offsets[i + 1]]."""
    arrays = read_arrays(path)
    keys = [f"{part}_{what}" for part in PARTS for what in ("data", "offsets")]
    if missing := [key for key in keys if key not in arrays]:
        raise UserError(
            f"{str(path)!r} has no array {missing[0]!r}; a packed file has {', '.join(keys)}"
        )
    for part in PARTS:
        data, offsets = arrays[f"{part}_data"], arrays[f"{part}_offsets"]
        whole = data.dtype == np.uint8 and offsets.dtype.kind in "iu" and offsets.ndim == 1
        if not whole or not len(offsets) or offsets[0] < 0 or offsets[-1] > data.size:
            raise UserError(f"{str(path)!r}: {part}_offsets does not fit {part}_data")

    def images(part: str) -> Iterator[np.ndarray]:
        data, offsets = arrays[f"{part}_data"], arrays[f"{part}_offsets"]
        for index in range(len(offsets) - 1):
            member = data[offsets[index] : offsets[index + 1]].tobytes()
            name = f"{part} image {index} of {str(path)!r}"
            yield _decode(name, io.BytesIO(member), size)

    facts = path.stat()
    counts = {part: len(arrays[f"{part}_offsets"]) - 1 for part in PARTS}
    identity = [str(path.resolve()), facts.st_size, facts.st_mtime_ns]
    return _Source(identity, counts, {part: images(part) for part in PARTS})


def _folder(root: Path, size: int) -> _Source:
    """The subfolders train and valid, or else a split by the hash of each file's name."""
    split = all((root / part).is_dir() for part in PARTS)
    files: dict[str, list[Path]] = {part: [] for part in PARTS}
    identity: list[Any] = [str(root.resolve())]
    for path in sorted(root.rglob("*")):
        if path.suffix.lower() not in _SUFFIXES or not path.is_file():
            continue
        name = path.relative_to(root).as_posix()
        part = path.relative_to(root).parts[0] if split else _part_of(name)
        if part in files:
            facts = path.stat()
            files[part].append(path)
            identity.append([name, facts.st_size, facts.st_mtime_ns])
    if len(identity) == 1:
        raise UserError(
            f"task.path = {str(root)!r}: no images in this folder ({', '.join(sorted(_SUFFIXES))})"
        )
    if not split and not all(files.values()):
        raise UserError(
            f"task.path = {str(root)!r} has too few images to hold some out by their names; "
            "sort them into the subfolders train and valid"
        )
    images = {part: (_decode(repr(str(p)), p, size) for p in files[part]) for part in PARTS}
    return _Source(identity, {part: len(files[part]) for part in PARTS}, images)


def _part_of(name: str) -> str:
    """By name alone, so that a file keeps its part whatever others come or go."""
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
    return "train" if number % _ONE_IN else "valid"


def _celeba(size: int) -> _Source:
    """The aligned faces, from the hub of `datasets`: their square part, made `size` wide."""
    try:
        import datasets  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise UserError(
            f"task.path = {CELEBA!r} needs the package datasets: pip install 'gaugelasso[images]'"
        ) from None
    try:
        held = {part: datasets.load_dataset("flwrlabs/celeba", split=part) for part in PARTS}
    except Exception as error:  # of the network, the hub or its cache: dozens of types
        raise UserError(
            f"CelebA cannot be loaded ({_first_line(error)}); it is downloaded on first use: "
            "check the network, or give a packed .npz or a folder as task.path"
        ) from None
    bilinear = _pillow().Resampling.BILINEAR

    def images(part: str) -> Iterator[np.ndarray]:
        for row in held[part]:
            face = row["image"].convert("RGB").crop(_CELEBA_SQUARE)
            yield np.asarray(face.resize((size, size), bilinear))

    counts = {part: len(held[part]) for part in PARTS}
    return _Source([CELEBA, counts], counts, {part: images(part) for part in PARTS})


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise UserError(
            "reading images needs the package pillow: pip install 'gaugelasso[images]'"
        ) from None
    return Image
