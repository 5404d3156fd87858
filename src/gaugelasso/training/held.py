"""When a loss counts as off its target, and which of the checkpoints that held it are kept."""

import math
from collections.abc import Collection, Mapping

# A mean loss is off target when it exceeds the target by more than this share of the target, or
# by more than this share of the way from the first loss down to it. The second rule matters for
# losses that never come near zero: half a language model's loss on top is a lost model.
SLACK = 0.5
WAY = 0.02
# One checkpoint of every size that held the target is kept, and sizes are counted in steps of this
# factor: together they take no more disk than a few of the largest.
SIZE_STEP = 1.5


def off_target(loss: float, target: float, first: float) -> bool:
    """Whether a mean loss has left its target; `first` is the first loss of the run."""
    slack = SLACK * abs(target)
    if first > target:
        slack = min(slack, WAY * (first - target))
    return not loss <= target + slack


def thinned(held: Mapping[int, float], always: Collection[int | None]) -> dict[int, float]:
    """Of checkpoints (step -> FMA) the smallest of every size, and those of the steps `always`.

    Of the smallest size the first is kept too: the last may be worse on held-out data.
    """
    least = min(held.values())
    first = min(step for step, fma in held.items() if fma == least)
    seen, kept = set(), {}
    for step, fma in sorted(held.items(), key=lambda item: (item[1], -item[0])):
        size = math.floor(math.log(fma, SIZE_STEP)) if fma > 0 else None
        if size not in seen or step == first or step in always:
            kept[step] = fma
        seen.add(size)
    return kept
