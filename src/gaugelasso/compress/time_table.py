"""The table of a profile: how long each operation takes over a grid of sizes, on a named device.

The file holds the times as they were measured. What is read between and around them never falls
as a size grows, so that measurement noise makes no price negative.
"""

import hashlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from gaugelasso.errors import UserError, errors_of, first_line
from gaugelasso.files.typed import build
from gaugelasso.files.untrusted import read_json

FORMAT = "gaugelasso profile 1"
MODES = ("forward", "decode")
# Times are continued beyond the largest measured size up to this multiple of it: a stream whose
# sites are split in time may be wider than it was.
_BEYOND = 2.0


@dataclass(frozen=True)
class Circumstances:
    """Where and of what the times are: one pass over `batch` sequences of `length`, or one token.

    In the mode `decode` the batch has one new token each, after a cache of `length` positions.
    """

    device: str
    hardware: str
    dtype: str
    torch: str
    date: str
    threads: int
    mode: str
    batch: int
    length: int

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UserError(f"mode = {self.mode!r}; a profile has {' or '.join(MODES)}")

    @property
    def described(self) -> str:
        """What a number of milliseconds is of."""
        what = f"{self.batch}×{self.length} tokens"
        if self.mode == "decode":
            what = f"one token of {self.batch} sequences after {self.length}"
        return f"{what}, {self.dtype}, {self.hardware}"


@dataclass(frozen=True)
class Timing:
    """The milliseconds of one operation at every point of a grid of sizes, ascending in each.

    Between two multiples of `multiples` the device does the same work: sizes are padded up to
    them, or the measurement found plateaus.
    """

    kind: str
    fixed: tuple[int, ...]
    multiples: tuple[int, ...]
    sizes: tuple[tuple[int, ...], ...]
    ms: np.ndarray

    def at(self, sizes: Sequence[Any]) -> Any:
        """Milliseconds at these sizes, numbers or arrays: linear between points of the grid.

        Constant below the smallest size and continued above the largest one.
        """
        sides = [_between(grid, size) for grid, size in zip(self.sizes, sizes, strict=True)]
        total: Any = 0.0
        for corner in itertools.product((0, 1), repeat=len(sides)):
            share: Any = 1.0
            for (_, weight), end in zip(sides, corner, strict=True):
                share = share * (weight if end else 1 - weight)
            place = tuple(low + end for (low, _), end in zip(sides, corner, strict=True))
            total = total + share * self._monotone[place]
        return total

    def check_covers(self, sizes: Sequence[int]) -> None:
        """UserError if a size is far above what was measured."""
        largest = [grid[-1] for grid in self.sizes]
        if len(sizes) != len(largest) or any(
            size > _BEYOND * most for size, most in zip(sizes, largest, strict=True)
        ):
            raise UserError(
                f"the profile measures the operation {self.kind!r} up to the sizes {largest}, and "
                f"the model has {list(sizes)}; measure this model: gaugelasso profile CONFIG"
            )

    @property
    def fewest(self) -> float:
        """Milliseconds at the smallest sizes: what it takes at any width."""
        return float(self._monotone[(0,) * self.ms.ndim])

    @cached_property
    def _monotone(self) -> np.ndarray:
        """Times that do not fall with any size; those of a single size are doubled, to be a line.

        The mean of the smallest such table above the measured one and of the largest below it.
        """
        above, below = self.ms.copy(), self.ms.copy()
        for axis in range(self.ms.ndim):
            above = np.maximum.accumulate(above, axis)
            below = np.flip(np.minimum.accumulate(np.flip(below, axis), axis), axis)
        mean = (above + below) / 2
        for axis, grid in enumerate(self.sizes):
            if len(grid) == 1:
                mean = np.repeat(mean, 2, axis)
        return mean

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "fixed": list(self.fixed),
            "multiples": list(self.multiples),
            "sizes": [list(grid) for grid in self.sizes],
            "ms": self.ms.tolist(),
        }


def _between(grid: tuple[int, ...], size: Any) -> tuple[Any, Any]:
    """The place of the grid's last point that is not above a size, and the share of the next."""
    size = np.maximum(np.asarray(size, dtype=float), grid[0])
    if len(grid) == 1:
        return np.zeros(size.shape, dtype=int), np.zeros(size.shape)
    points = np.asarray(grid, dtype=float)
    low = np.clip(np.searchsorted(points, size, side="right") - 1, 0, len(grid) - 2)
    return low, (size - points[low]) / (points[low + 1] - points[low])


@dataclass(frozen=True)
class TimeTable:
    """All operations of a profile."""

    circumstances: Circumstances
    timings: tuple[Timing, ...]

    def find(self, kind: str, fixed: tuple[int, ...]) -> Timing:
        """The times of an operation; UserError if they were not measured."""
        kinds = [timing for timing in self.timings if timing.kind == kind]
        found = [timing for timing in kinds if timing.fixed == fixed]
        if not found:
            known = ", ".join(str(timing.fixed) for timing in kinds)
            which = f"{kind!r} with the numbers {fixed} (it has {known})" if kinds else f"{kind!r}"
            raise UserError(
                f"the profile has no times of the operation {which}; measure this model: "
                "gaugelasso profile CONFIG"
            )
        return found[0]

    @property
    def digest(self) -> str:
        """The same for the same table, wherever its file is."""
        return hashlib.sha256(json.dumps(self.to_dict()).encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """What the file holds."""
        about = {"format": FORMAT, **vars(self.circumstances)}
        return {**about, "operations": [timing.to_dict() for timing in self.timings]}

    @classmethod
    def from_dict(cls, data: Any) -> "TimeTable":
        """UserError, naming the key, unless this is what `to_dict` gives."""
        if not isinstance(data, Mapping) or data.get("format") != FORMAT:
            raise UserError(f"no profile: 'format' is not {FORMAT!r}; write it with "
                            "gaugelasso profile")  # fmt: skip
        rows = data.get("operations")
        if not isinstance(rows, list) or not rows:
            raise UserError("'operations' is not a list of measured operations")
        about = {key: data[key] for key in data if key not in ("format", "operations")}
        for key in Circumstances.__dataclass_fields__:
            if key not in about:
                raise UserError(f"key {key!r} is missing")
        return cls(build("profile", Circumstances, about), tuple(map(_timing, rows)))

    @classmethod
    def read(cls, path: Path) -> "TimeTable":
        """The table of a file; UserError if the file is missing or damaged."""
        try:
            data = read_json(path)
        except FileNotFoundError:
            raise UserError(
                f"profile {str(path)!r}: no such file; measure it with gaugelasso profile CONFIG "
                f"--out {path}"
            ) from None
        # ValueError: no valid JSON. RecursionError: nested too deeply.
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"profile {str(path)!r}: not readable ({first_line(error)})") from None
        with errors_of(path):
            return cls.from_dict(data)


def _timing(row: Any) -> Timing:
    if not isinstance(row, Mapping) or not isinstance(row.get("kind"), str):
        raise UserError(f"an operation is a JSON object with a 'kind', not {str(row)[:60]!r}")
    kind = row["kind"]
    fixed, multiples = (_whole(kind, key, row.get(key)) for key in ("fixed", "multiples"))
    grids = row.get("sizes")
    if not isinstance(grids, list) or not grids or len(grids) != len(multiples):
        raise UserError(f"operation {kind!r}: 'sizes' and 'multiples' need an entry for each size")
    sizes = tuple(_whole(kind, "sizes", grid) for grid in grids)
    for grid in sizes:
        if not grid or grid[0] < 1 or any(a >= b for a, b in itertools.pairwise(grid)):
            raise UserError(f"operation {kind!r}: 'sizes' = {list(grid)} do not ascend from 1")
    if any(each < 1 for each in multiples):
        raise UserError(f"operation {kind!r}: 'multiples' = {list(multiples)} must be 1 or more")
    try:
        ms = np.asarray(row.get("ms"), dtype=float)
    except (TypeError, ValueError):
        ms = np.empty(0)
    shape = tuple(map(len, sizes))
    if ms.shape != shape or not np.isfinite(ms).all() or not (ms > 0).all():
        raise UserError(
            f"operation {kind!r}: 'ms' is not a table of {'×'.join(map(str, shape))} positive "
            "numbers"
        )
    return Timing(kind, fixed, multiples, sizes, ms)


def _whole(kind: str, key: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(
        type(each) is int and 0 <= each < 2**40 for each in value
    ):
        raise UserError(f"operation {kind!r}: {key!r} is not a list of whole numbers")
    return tuple(value)


def rounded_up(size: Any, multiple: int) -> Any:
    """The next multiple of a size, a number or an array."""
    return -(-size // multiple) * multiple


def preferred_multiple(multiple: int, factor: int) -> int:
    """Of how many indices a width is a multiple, if `factor` channels of each make up a size."""
    return multiple // math.gcd(multiple, factor)
