"""Images for training, decoded once: from a packed file, a folder, or CelebA.

Kept as memory-mapped uint8 arrays in a cache on disk, with the colour statistics of the
training part. Every image must be square and of the size asked for: what to cut away from
an image is the user's to decide. Draws no batches and shows no picture.
"""

import contextlib
import errno
import functools
import hashlib
import io
import json
import logging
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from gaugelasso.errors import UserError, first_line
from gaugelasso.files import durable
from gaugelasso.files.untrusted import UNREADABLE, open_plain, read_arrays, read_json
from gaugelasso.tasks import stored

CELEBA = "celeba"
PARTS = ("train", "valid")
_SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp"}
# Of a folder that is not split: one image in so many is held out.
_ONE_IN = 16
# Of CelebA's aligned images, 178 x 218: the square around the face.
_CELEBA_SQUARE = (0, 20, 178, 198)
_OF_YOUR_OWN = "give a packed .npz or a folder as task.path"
_LAYOUT = 1  # of the cache; another layout takes another number
_log = logging.getLogger(__name__)


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
            raise UserError(
                f"task.path = {path!r} has no images for {part}; put some into that part, for "
                "a run trains on one and is measured on the other"
            )
    name = hashlib.sha256(json.dumps([_LAYOUT, size, source.identity]).encode()).hexdigest()[:24]
    home = stored.cache_folder() / "images" / name
    held = _cached(home) if home.exists() else None
    return held or _decoded(home, source, size)


def _cached(home: Path) -> Images | None:
    """What a folder of the cache holds; None, with a warning, if that is not as it was made."""
    try:
        about = read_json(home / "about.json")
        parts = {}
        for part in PARTS:
            open_plain(home / f"{part}.npy").close()
            parts[part] = np.load(home / f"{part}.npy", mmap_mode="r")
            # Earlier versions did not tell.
            if "known" in about and about["known"][part] != stored.known(parts[part]):
                raise ValueError(f"{part}.npy is not as it was written")
        return Images(parts, tuple(about["mean"]), tuple(about["std"]))
    except (*UNREADABLE, RecursionError) as error:
        said = first_line(error)
    _log.warning("warning: cache %r is damaged (%s); it is made anew", str(home), said)
    return None


def _decoded(home: Path, source: _Source, size: int) -> Images:
    """Written aside, then renamed as a whole folder: no run ever sees half of it.

    Others may do the same at the same time. So what is damaged is moved, never emptied where it
    lies, and what was made here is mapped before anybody else can move it.
    """
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        # What is still mapped cannot be removed on some network disks; it does no harm there.
        with tempfile.TemporaryDirectory(dir=home.parent, ignore_cleanup_errors=True) as aside:
            with contextlib.suppress(FileNotFoundError):  # there was none, or another moved it
                durable.rename(home, Path(aside) / "damaged")
            folder = Path(aside) / "images"
            _write(folder, source, size)
            held = _cached(folder)
            if held is None:
                raise UserError(
                    f"cache {str(home)!r} is damaged as soon as it is made; is its disk sound?"
                )
            try:
                durable.rename(folder, home)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                held = _cached(home) or held  # another was faster: all share the same pages
            return held
    except OSError as error:
        raise UserError(
            f"cannot keep decoded images under {str(home.parent)!r} ({error.strerror or error}); "
            "set GAUGELASSO_CACHE to a folder with room"
        ) from None


def _write(folder: Path, source: _Source, size: int) -> None:
    folder.mkdir()
    known = {}
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
        known[part] = stored.known(array)
        durable.sync(folder / f"{part}.npy")
    about = json.dumps({"mean": mean, "std": std, "known": known})
    durable.write_new(folder / "about.json", [about.encode()])


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
        # Of this one the words are the file once more, or the address of its bytes in memory.
        unknown = isinstance(error, image.UnidentifiedImageError)
        said = "of no format that is known" if unknown else first_line(error)
        raise UserError(f"{name} is not a readable image ({said}); remove or replace it") from None
    if pixels is None:
        raise UserError(
            f"{name} is {width}x{height} pixels, but task.size = {size} expects {size}x{size}; "
            "resize the images, or change task.size"
        )
    return pixels


# --- where images come from -------------------------------------------------------------


def _local(path: str, size: int) -> _Source:
    place = stored.place(path, "task.path")
    if place.is_dir():
        return _folder(place, size)
    if not place.exists():
        raise UserError(
            f"task.path = {path!r}: no such file or folder{stored.seen_from(place)}; give a packed "
            f".npz, a folder of images, 'generated' or {CELEBA!r}"
        )
    return _packed(place, size)


def _packed(path: Path, size: int) -> _Source:
    """Keys {train,valid}_{data,offsets}: image i is the bytes data[offsets[i]:offsets[i + 1]]."""
    keys = [f"{part}_{what}" for part in PARTS for what in ("data", "offsets")]
    wanted = f"a packed file of images is an .npz with the arrays {', '.join(keys)}"
    try:
        arrays = read_arrays(path)
    except UserError as error:
        raise UserError(f"task.path: {error}; {wanted}") from None
    if missing := [key for key in keys if key not in arrays]:
        raise UserError(f"{str(path)!r} has no array {missing[0]!r}; {wanted}")
    for part in PARTS:
        _check_offsets(path, part, arrays[f"{part}_data"], arrays[f"{part}_offsets"])

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


def _check_offsets(path: Path, part: str, data: np.ndarray, offsets: np.ndarray) -> None:
    bytes_in_a_row = data.dtype == np.uint8 and data.ndim == 1
    if not bytes_in_a_row or offsets.dtype.kind not in "iu" or offsets.ndim != 1:
        raise UserError(
            f"{str(path)!r}: {part}_data must be one row of uint8 and {part}_offsets one of whole "
            "numbers; pack the images anew"
        )
    # Compared, not subtracted: a difference of unsigned numbers is never negative.
    rise = bool(len(offsets)) and (offsets[1:] > offsets[:-1]).all()
    if not rise or offsets[0] < 0 or offsets[-1] > data.size:
        raise UserError(
            f"{str(path)!r}: {part}_offsets does not fit {part}_data: they must rise from one to "
            f"the next, and end within its {data.size:,} bytes; pack the images anew"
        )


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
            f"task.path = {str(root)!r}: no images in this folder; put files into it that end in "
            f"{', '.join(sorted(_SUFFIXES))}"
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
            f"task.path = {CELEBA!r} needs the package datasets: pip install "
            f"'gaugelasso[images]'; or {_OF_YOUR_OWN}"
        ) from None
    try:
        held = {part: datasets.load_dataset("flwrlabs/celeba", split=part) for part in PARTS}
    except Exception as error:  # of the network, the hub or its cache: dozens of types
        raise UserError(
            f"CelebA cannot be loaded ({first_line(error)}); it is downloaded on first use: "
            f"check the network, or {_OF_YOUR_OWN}"
        ) from None
    bilinear = _pillow().Resampling.BILINEAR

    def images(part: str) -> Iterator[np.ndarray]:
        for index in range(len(held[part])):
            try:
                face = held[part][index]["image"].convert("RGB").crop(_CELEBA_SQUARE)
                pixels = np.asarray(face.resize((size, size), bilinear))
            except Exception as error:  # of the row, its columns or its decoder
                raise UserError(
                    f"{part} image {index} of CelebA cannot be read ({first_line(error)}); remove "
                    f"it from the cache of datasets, to be downloaded anew, or {_OF_YOUR_OWN}"
                ) from None
            yield pixels

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
