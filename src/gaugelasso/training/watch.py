"""The watch: does a run hold its loss target, and is it beyond recovery?

Under pressure the loss swings around its target, and most excursions end by themselves. The
default of `train.patience` is longer than any that did under the conservative solver, in 40
runs of retrieval and two of ff31 at the paper's size (docs/development/log.md). Numbers only: the
trainer has the states.
"""

from gaugelasso.training.memory import Memory

# A mean loss is off its target when it is above it by more than this share of it, or by more
# than this share of the way down to it: a loss that no model brings near zero is lost long
# before it is half as high again.
SLACK = 0.5
WAY = 0.02
# How many times in a row a run goes back because of losses that are not numbers.
TRIES = 3


def off_target(loss: float, target: float, first: float) -> bool:
    """Whether a loss that was `first` at the start has left its target."""
    slack = SLACK * abs(target)
    if first > target:
        slack = min(slack, WAY * (first - target))
    return not loss <= target + slack


def pressure(returns: int) -> float:
    """The share of pressure left after so many returns: what was too much is not tried again."""
    return 0.5**returns


def note_(memory: Memory, target: float, pressed: bool, count: int) -> None:
    """After a row of `count` steps: which checkpoint held, and for how long none would.

    A checkpoint lies behind its step's event: whether that cost the target, only a row of steps
    after it can tell.
    """
    if memory.loss is None or memory.first_loss is None:
        return
    off = off_target(memory.loss, target, memory.first_loss)
    pending_step = memory.pending_step
    if pending_step is not None and pending_step <= memory.row_at and (off or memory.holds(target)):
        if not off:
            memory.hold_(pending_step, memory.pending_fma)
        memory.pending_step = None
    off = off and pressed and memory.reached_at is not None
    memory.steps_off_target = memory.steps_off_target + count if off else 0


def lost(memory: Memory, target: float) -> bool:
    """Whether the last row is off a target that a checkpoint has held."""
    if memory.loss is None or memory.first_loss is None:
        return False
    return bool(memory.held) and off_target(memory.loss, target, memory.first_loss)


def choices(memory: Memory) -> list[int]:
    """The checkpoints to go back to, the best first: the last that held, and those before.

    Where the last was in vain, only those before, if there are any.
    """
    failed_returns = memory.last_return_step == memory.held_at and memory.held_before_at is not None
    last = [memory.held_before_at] if failed_returns else [memory.held_at, memory.held_before_at]
    steps = [step for step in last if step is not None]
    older = [step for step in memory.held if step < min(steps, default=0)]
    return steps + sorted(older, reverse=True)


def fallback_steps(memory: Memory) -> list[int]:
    """The checkpoints to go back to when steps fail, the best first.

    The newest that was not off its target; where that was in vain, those that held it before.
    """
    good = [] if memory.fallback_step is None else [memory.fallback_step]
    steps = choices(memory) + good if memory.failed_returns else good + choices(memory)
    return list(dict.fromkeys(steps))


def returned_(memory: Memory, step: int) -> None:
    """The run is back at the state of this step: what was known is of one that is no more."""
    memory.returns += 1
    if step in choices(memory):
        memory.last_return_step = step
        if step != memory.held_at:
            memory.held_at, memory.held_before_at = step, None
    memory.fallback_step = step
    memory.steps_off_target, memory.pending_step, memory.loss, memory.unlogged = 0, None, None, []
