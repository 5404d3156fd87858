"""Tables of a profile made up by a formula, for tests of prices."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from gaugelasso.axes import Compressible, named_tensors
from gaugelasso.compress.latency import at_widths
from gaugelasso.compress.time_table import Circumstances, TimeTable, Timing
from gaugelasso.kernels.hardware import hardware

Formula = Callable[..., float]


def linear(*sizes: int) -> float:
    """A launch, and a time for each number that is computed."""
    return 0.01 + 1e-4 * float(np.prod(sizes))


def table_for(
    model: Compressible, formula: Formula = linear, multiple: int = 1, points: int = 4
) -> TimeTable:
    """The times of all operations of a model, up to its widths."""
    table = model.axis_table()
    widths = table.widths(named_tensors(model))
    most: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for operation in table.operations:
        sizes = [at_widths(size, widths) for size in operation.sizes]
        key = (operation.kind, operation.fixed)
        most[key] = list(map(max, most.get(key, sizes), sizes))
    timings = []
    for (kind, fixed), sizes in most.items():
        grids = [_grid(-(-size // multiple) * multiple, multiple, points) for size in sizes]
        ms = np.array([formula(*at) for at in itertools.product(*grids)])
        shape = tuple(map(len, grids))
        multiples = (multiple,) * len(grids)
        timings.append(Timing(kind, fixed, multiples, tuple(grids), ms.reshape(shape)))
    where = {"device": "cpu", "hardware": hardware("cpu"), "dtype": "float32", "torch": "2"}
    about = Circumstances(**where, date="2026", threads=1, mode="forward", batch=1, length=6)
    return TimeTable(about, tuple(timings))


def _grid(largest: int, multiple: int, points: int) -> tuple[int, ...]:
    shares = {largest * i // points // multiple * multiple for i in range(points)}
    return tuple(sorted({max(multiple, each) for each in shares} | {largest}))


def written(table: TimeTable, path: Path) -> Path:
    path.write_text(json.dumps(table.to_dict()))
    return path
