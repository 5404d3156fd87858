"""The end of a run: is it one, where the target is missed? And what is said then."""

import functools
import math
from collections.abc import Callable
from typing import Any

from gaugelasso import watch
from gaugelasso.checkpoint import Checkpoint
from gaugelasso.evaluation import evaluate
from gaugelasso.state import RunState


def way_on(state: RunState, summary: dict[str, Any]) -> Callable[[], None] | None:
    """What to do where the end misses the target, if anything; changes nothing yet.

    An anneal that lost the target in training, too, is done once more from where it was held.
    Otherwise the run ends on the smallest state on its way that holds the target on held-out
    data, as it was.
    """
    memory, loss = state.memory, summary["loss"]
    if summary["held"] or memory.ended_at is not None:
        return None
    why = f"held-out loss {'no number' if loss is None else f'{loss:.4g}'} after the anneal"
    lost = not memory.holds(state.config.target.loss)
    if lost and memory.again_at is None and (held := state.held(watch.choices(memory))):
        return functools.partial(_anneal_again, state, held, why)
    end = _better_end(state, loss if lost else None)
    return functools.partial(_end_on, state, end, why) if end else None


def _anneal_again(state: RunState, held: Checkpoint, why: str) -> None:
    state.go_back(held, why)
    state.memory.again_at = state.memory.frozen_at = state.steps


def _end_on(state: RunState, held: Checkpoint, why: str) -> None:
    state.go_back(held, why)
    state.memory.held_at, state.memory.ended_at = held.step, state.steps
    state.save()


def _better_end(state: RunState, lost: float | None) -> Checkpoint | None:
    """The smallest state that held the target and does so on held-out data.

    Where none does, the smallest that is at least better than what was `lost`. A work target
    that is met stays so.
    """
    config, better = state.config, None
    most = config.target.fma if state.spent else math.inf
    for _, step in sorted((fma, step) for step, fma in state.memory.held.items() if fma <= most):
        if held := state.held([step]):
            model = held.model(state.device)
            loss, _ = evaluate(model, config, config.train.final_batches, state.device, state.team)
            if loss <= config.target.loss:
                return held
            if lost is not None and loss < lost:
                better = better or held
    return better


def said_missed(state: RunState, summary: dict[str, Any]) -> str:
    """Of a target that was never reached."""
    whole = summary["fma_final"] == summary["fma_initial"]
    kept = "nothing was compressed, the full model" if whole else "the model as it ended"
    best = state.memory.best_loss
    return (
        f"target.loss = {state.config.target.loss} was never reached in {summary['steps']} steps "
        f"(best training loss {'none' if best is None else f'{best:.4g}'}): {kept} is in "
        f"{str(state.folder.checkpoints)!r}. Raise target.loss or train.steps"
    )
