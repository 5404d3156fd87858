"""How long a step took at the full structure: one definition, for who trains and who reports.

Read off the rows of metrics.jsonl alone, so that a run which goes on says what it said before.
"""

import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

_ROWS = 10
# A row may hold a graph capture, and the first pays for setting up: a median must outvote it.
_FEWEST = 3


def initial_step_ms(
    rows: Iterable[Mapping[str, Any]], fma_initial: float, *, going: bool = False
) -> float | None:
    """Median step time in ms over the first rows of a log at the full structure.

    None where these are too few or, `going` on, where the next row might still be one of them:
    what is told once stays.
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
