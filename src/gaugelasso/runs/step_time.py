"""The time of a step at the full structure: one definition, for training and for reports.

It depends on the rows of metrics.jsonl only, so a resumed run gives the same value as before.
"""

import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

_ROWS = 10
# A row may include a graph capture, and the first includes the setup: the median needs others.
_FEWEST = 3


def initial_step_ms(
    rows: Iterable[Mapping[str, Any]], fma_initial: float, *, going: bool = False
) -> float | None:
    """Return the median step time in ms over the first rows of a log at the full structure.

    None if there are too few such rows. While the run trains (`going`), also None if the next row
    may still be one of them, so that a value once returned does not change.
    """
    times: list[float] = []
    for row in rows:
        if len(times) == _ROWS or row.get("fma") != fma_initial:
            break
        time = row.get("step_ms")
        if time is not None and math.isfinite(time):
            times.append(time)
    else:
        if going and len(times) < _ROWS:
            return None
    return statistics.median(times) if len(times) >= _FEWEST else None
