"""The ladder: uniform models from the smallest to the full one, and the search along it.

The search is a function of the results so far, so an interrupted one needs no other state.
Trains nothing.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Literal

from gaugelasso.bench.inference import narrowed
from gaugelasso.config import Config
from gaugelasso.config.model import ModelConfig
from gaugelasso.errors import UserError

# From one width of the ladder to the next smaller one. Steps finer than this are below the
# differences between seeds, and each halving of the step costs one training more.
_STEP = 0.95
# The smallest model that reaches the loss is accepted once so many directly below it have not.
_MISSES = 2

Scale = Literal["dims", "heads"]


def fewer_heads(full: ModelConfig, width: int) -> ModelConfig:
    """Return the model with this width, and heads and d_f in proportion; d_k and d_v stay."""
    share = width / full.width
    return dataclasses.replace(
        full,
        width=width,
        heads=max(1, round(full.heads * share)),
        kv_heads=max(1, round(full.kv_heads * share)) if full.kv_heads else 0,
        d_f=max(1, round(full.d_f * share)),
    )


_NARROWER: Mapping[Scale, Callable[[ModelConfig, int], ModelConfig]] = {
    "dims": narrowed,
    "heads": fewer_heads,
}


def ladder(config: Config, scale: Scale) -> list[ModelConfig]:
    """Return the uniform models of one way to narrow the config's model, the smallest first.

    The last is the config's model itself. A width that cannot be built is left out, such as one
    whose heads are not a multiple of its kv_heads.
    """
    full = config.model
    assert isinstance(full, ModelConfig)
    width, rungs = full.width, [full]
    while width > 1:
        width = min(width - 1, math.floor(width * _STEP))
        model = _NARROWER[scale](full, width)
        try:
            model.spec(config.task)
        except UserError:
            continue
        rungs.append(model)
    return rungs[::-1]


def settings_of(model: ModelConfig) -> tuple[str, ...]:
    """The changes of a config that lead to a rung, as `--set` takes them."""
    keys = ("width", "heads", "kv_heads", "d_k", "d_v", "d_f")
    return tuple(f"model.{key}={getattr(model, key)}" for key in keys)


def smallest_reaching(results: Mapping[int, bool]) -> int | None:
    """Return the lowest rung that reached the loss; None if none did."""
    return min((rung for rung, reached in results.items() if reached), default=None)


def next_rungs(results: Mapping[int, bool], rungs: int, most: int = 1) -> list[int]:
    """Return the rungs to train next, at most `most`; none once the search is over.

    Rungs are numbered from the smallest model; `results` says which of those trained reached the
    loss. First comes the full model, then a bisection between the smallest model that reached the
    loss and the largest below it that did not, in `most` + 1 parts. Training is noisy, so at the
    end the rungs directly below the smallest one are trained too, until two in a row have missed.
    """
    if rungs - 1 not in results:
        return [rungs - 1]
    best = smallest_reaching(results)
    high = rungs if best is None else best
    low = max((rung for rung in results if rung < high), default=-1)
    between = high - low - 1
    if between:
        parts = min(most, between) + 1
        return [low + (high - low) * part // parts for part in range(1, parts)]
    below = range(max(0, high - _MISSES), high)
    return [rung for rung in below if rung not in results][::-1][:most]
