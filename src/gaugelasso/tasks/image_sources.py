"""Where images come from: a packed file, a folder, or CelebA.

A source yields decoded images one by one. Every image must be square and of the configured
size: cropping and resizing are left to the user, except for CelebA. Writes no cache and
draws no batches.
"""

import hashlib
import io
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from gaugelasso.errors import UserError, first_line
from gaugelasso.files.untrusted import read_arrays
from gaugelasso.tasks import stored

CELEBA = "celeba"
PARTS = ("train", "valid")
_SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp"}
# In a folder without the subfolders train and valid, one image in this many is held out.
_ONE_IN = 16
# The square around the face in CelebA's aligned images, which are 178 x 218.
_CELEBA_SQUARE = (0, 20, 178, 198)
_OWN_IMAGES = "give a packed .npz or a folder as task.path"


@dataclass(frozen=True)
class Source:
    """Images to decode, by part. `identity` is JSON data that changes when the images do."""

    identity: Any
    counts: Mapping[str, int]
    images: Mapping[str, Iterable[np.ndarray]]


def find(path: str, size: int) -> Source:
    """The source named by `task.path`; UserError if it has no images for one of the parts."""
    source = _celeba(size) if path == CELEBA else _local(path, size)
    for part in PARTS:
        if not source.counts[part]:
            raise UserError(
                f"task.path = {path!r} has no images for {part}; a run trains on the part train "
                "and is measured on the part valid, so both need images"
            )
    return source


def _local(path: str, size: int) -> Source:
    place = stored.expand(path, "task.path")
    if place.is_dir():
        return _folder(place, size)
    if not place.exists():
        raise UserError(
            f"task.path = {path!r}: no such file or folder{stored.searched_in(place)}; give a "
            f"packed .npz, a folder of images, 'generated' or {CELEBA!r}"
        )
    return _packed(place, size)


def _packed(path: Path, size: int) -> Source:
    """Keys {train,valid}_{data,offsets}: image i is the bytes data[offsets[i]:offsets[i + 1]]."""
    keys = [f"{part}_{what}" for part in PARTS for what in ("data", "offsets")]
    expected = f"a packed file of images is an .npz with the arrays {', '.join(keys)}"
    try:
        arrays = read_arrays(path)
    except UserError as error:
        raise UserError(f"task.path: {error}; {expected}") from None
    if missing := [key for key in keys if key not in arrays]:
        raise UserError(f"{str(path)!r} has no array {missing[0]!r}; {expected}")
    for part in PARTS:
        _check_offsets(path, part, arrays[f"{part}_data"], arrays[f"{part}_offsets"])

    def images(part: str) -> Iterator[np.ndarray]:
        data, offsets = arrays[f"{part}_data"], arrays[f"{part}_offsets"]
        for index in range(len(offsets) - 1):
            member = data[offsets[index] : offsets[index + 1]].tobytes()
            name = f"{part} image {index} of {str(path)!r}"
            yield decode(name, io.BytesIO(member), size)

    stat = path.stat()
    counts = {part: len(arrays[f"{part}_offsets"]) - 1 for part in PARTS}
    identity = [str(path.resolve()), stat.st_size, stat.st_mtime_ns]
    return Source(identity, counts, {part: images(part) for part in PARTS})


def _check_offsets(path: Path, part: str, data: np.ndarray, offsets: np.ndarray) -> None:
    is_byte_vector = data.dtype == np.uint8 and data.ndim == 1
    if not is_byte_vector or offsets.dtype.kind not in "iu" or offsets.ndim != 1:
        raise UserError(
            f"{str(path)!r}: {part}_data must be a vector of uint8 and {part}_offsets a vector of "
            "integers; pack the images again"
        )
    # Compared, not subtracted: a difference of unsigned integers is never negative.
    increasing = bool(len(offsets)) and (offsets[1:] > offsets[:-1]).all()
    if not increasing or offsets[0] < 0 or offsets[-1] > data.size:
        raise UserError(
            f"{str(path)!r}: {part}_offsets does not fit {part}_data: offsets must increase and "
            f"end within its {data.size:,} bytes; pack the images again"
        )


def _folder(root: Path, size: int) -> Source:
    """The subfolders train and valid, or else a split by the hash of each file's name."""
    has_parts = all((root / part).is_dir() for part in PARTS)
    files: dict[str, list[Path]] = {part: [] for part in PARTS}
    identity: list[Any] = [str(root.resolve())]
    for path in sorted(root.rglob("*")):
        if path.suffix.lower() not in _SUFFIXES or not path.is_file():
            continue
        name = path.relative_to(root).as_posix()
        part = path.relative_to(root).parts[0] if has_parts else _part_of(name)
        if part in files:
            stat = path.stat()
            files[part].append(path)
            identity.append([name, stat.st_size, stat.st_mtime_ns])
    if len(identity) == 1:
        raise UserError(
            f"task.path = {str(root)!r}: no images in this folder; add files that end in "
            f"{', '.join(sorted(_SUFFIXES))}"
        )
    if not has_parts and not all(files.values()):
        raise UserError(
            f"task.path = {str(root)!r} has too few images to hold some out by the hash of their "
            "names; sort them into the subfolders train and valid"
        )
    images = {part: (decode(repr(str(p)), p, size) for p in files[part]) for part in PARTS}
    return Source(identity, {part: len(files[part]) for part in PARTS}, images)


def _part_of(name: str) -> str:
    """Depends on the name alone: a file keeps its part when others are added or removed."""
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
    return "train" if number % _ONE_IN else "valid"


def _celeba(size: int) -> Source:
    """The aligned faces from the Hugging Face hub, cropped to a square and resized to `size`."""
    try:
        import datasets  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise UserError(
            f"task.path = {CELEBA!r} needs the package datasets: pip install "
            f"'gaugelasso[images]'; or {_OWN_IMAGES}"
        ) from None
    try:
        splits = {part: datasets.load_dataset("flwrlabs/celeba", split=part) for part in PARTS}
    except Exception as error:  # the network, the hub and its cache raise dozens of types
        raise UserError(
            f"CelebA cannot be loaded ({first_line(error)}); it is downloaded on first use: "
            f"check the network, or {_OWN_IMAGES}"
        ) from None
    bilinear = _pillow().Resampling.BILINEAR

    def images(part: str) -> Iterator[np.ndarray]:
        for index in range(len(splits[part])):
            try:
                face = splits[part][index]["image"].convert("RGB").crop(_CELEBA_SQUARE)
                pixels = np.asarray(face.resize((size, size), bilinear))
            except Exception as error:  # a bad row, a missing column or a decoder's own type
                raise UserError(
                    f"{part} image {index} of CelebA cannot be read ({first_line(error)}); remove "
                    "it from the cache of datasets so that it is downloaded again, or "
                    f"{_OWN_IMAGES}"
                ) from None
            yield pixels

    counts = {part: len(splits[part]) for part in PARTS}
    return Source([CELEBA, counts], counts, {part: images(part) for part in PARTS})


def decode(name: str, file: Path | IO[bytes], size: int) -> np.ndarray:
    """[size, size, 3] uint8; UserError names the image if it is unreadable or of another size."""
    image = _pillow()
    try:
        with image.open(file) as opened:
            width, height = opened.size
            pixels = np.asarray(opened.convert("RGB")) if width == height == size else None
    except Exception as error:  # decoders raise many types: OSError, SyntaxError, ...
        # Pillow's message for an unknown format repeats the file's name or prints an address.
        unknown = isinstance(error, image.UnidentifiedImageError)
        reason = "unknown format" if unknown else first_line(error)
        raise UserError(
            f"{name} is not a readable image ({reason}); remove or replace it"
        ) from None
    if pixels is None:
        raise UserError(
            f"{name} is {width}x{height} pixels, but task.size = {size} expects {size}x{size}; "
            "resize the images, or change task.size"
        )
    return pixels


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise UserError(
            "reading images needs the package pillow: pip install 'gaugelasso[images]'"
        ) from None
    return Image
