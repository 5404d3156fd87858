"""The end of a run: is it one, where the target is missed? And what is said then."""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

from gaugelasso.models import Transformer
from gaugelasso.runs.checkpoint import Checkpoint
from gaugelasso.training import watch
from gaugelasso.training.evaluation import evaluate, final_figures
from gaugelasso.training.state import RunState


def next_attempt(state: RunState, summary: dict[str, Any]) -> Callable[[], None] | None:
    """What to do where the end misses the target, if anything; changes nothing yet.

    An anneal that lost the target in training, too, is done once more from where it was held.
    Otherwise the run ends on the smallest state on its way that holds the target on held-out
    data, as it was.
    """
    memory, train = state.memory, state.config.train
    if summary["held"] or memory.ended_at is not None:
        return None
    loss = math.inf if summary["loss"] is None else summary["loss"]
    why = f"held-out loss {loss:.4g} after the anneal"
    lost = not memory.holds(state.config.target.loss)
    anneal = train.cooldown if memory.frozen_at is None else train.saturation
    again = lost and anneal and not memory.second_anneal_steps
    if again and (held := state.first_intact(small_enough(state, watch.choices(memory)))):
        return functools.partial(_anneal_again, state, held, anneal, why)
    end = _better_end(state, loss if lost or math.isinf(loss) else -math.inf)
    return functools.partial(_end_on, state, end, why) if end else None


def end_early(state: RunState, why: str) -> bool:
    """End on a state that holds the target, where there is no way on; False if none does."""
    end = _better_end(state, -math.inf)
    if end:
        _end_on(state, end, f"{why}; the run ends here, on a state that held its target")
    return bool(end)


def _anneal_again(state: RunState, held: Checkpoint, steps: int, why: str) -> None:
    state.roll_back(held, why)
    state.memory.second_anneal_steps, state.memory.frozen_at = steps, state.steps


def _end_on(state: RunState, held: Checkpoint, why: str) -> None:
    state.roll_back(held, why)
    memory = state.memory
    memory.held_at, memory.ended_at = held.step, state.steps
    memory.held.pop(state.steps, None)  # which it takes the place of
    state.save()


def _better_end(state: RunState, bar: float) -> Checkpoint | None:
    """The smallest state that held the target and does so on held-out data, of equals the last.

    Where none does, the smallest whose loss is at least below `bar`.
    """
    target, held_fma, better = state.config.target, state.memory.held, None
    smallest_first = sorted(held_fma, key=lambda step: (held_fma[step], -step))
    for step in small_enough(state, smallest_first):
        if held := state.first_intact([step]):
            loss, _, _ = final(state, held.model(state.device))
            if loss <= target.loss:
                return held
            if loss < bar:
                better = better or held
    return better


def small_enough(state: RunState, steps: Iterable[int]) -> list[int]:
    """Of these checkpoints those to go back to: a work target that is met stays so."""
    most = state.config.target.fma if state.compressor.work_target_met else math.inf
    return [step for step in steps if state.memory.held.get(step, 0.0) <= most]


def final(state: RunState, model: Transformer) -> tuple[float, float, dict[str, float]]:
    """What a run is judged by: loss and metric on held-out data, and the task's further figures."""
    config, device, team = state.config, state.device, state.team
    batches, name = config.train.final_batches, config.task.metric_name
    loss, metric = evaluate(model, config, batches, device, team)
    figures = team.on_rank0(lambda: final_figures(model, config, batches, device))
    return figures.pop("loss", loss), figures.pop(name, metric), figures


def missed_message(state: RunState, summary: dict[str, Any]) -> str:
    """Of a target that was never reached."""
    whole = summary["fma_final"] == summary["fma_initial"]
    kept = "nothing was compressed, the full model" if whole else "the model as it ended"
    best = state.memory.best_loss
    return (
        f"target.loss = {state.config.target.loss} was never reached in {summary['steps']} steps "
        f"(best training loss {'none' if best is None else f'{best:.4g}'}): {kept} is in "
        f"{str(state.folder.checkpoints)!r}. Raise target.loss or train.steps, or try another "
        "compress.lr"
    )
