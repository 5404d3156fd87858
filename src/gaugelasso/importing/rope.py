"""The frequencies of RoPE: plain, or scaled for a context that is longer than that of pretraining.

The transformer stores one frequency for each pair, so scaled ones are in every form of a model.
Scaling that depends on the length of a sequence, or that also scales attention, is refused.
"""

import math
from dataclasses import dataclass

from gaugelasso.errors import UserError
from gaugelasso.importing.source import Settings, Source

# Of a GGUF file: divisors of the frequencies, which Llama 3 has.
FACTORS = "rope_freqs.weight"
_PLAIN, _LINEAR, _LLAMA3 = "default", "linear", "llama3"


@dataclass(frozen=True)
class Bands:
    """Llama 3 divides low frequencies by a factor and keeps high ones.

    Pair p turns n_p = context f_p / 2 pi times in the context of pretraining. It is low up to `low`
    turns and high from `high` turns on. Between them its share of the high ones grows linearly.
    """

    low: float
    high: float
    context: float

    def share(self, frequency: float) -> float:
        """Of the high frequencies: 0 for low ones, 1 for high ones."""
        turns = self.context * frequency / (2 * math.pi)
        return min(1.0, max(0.0, (turns - self.low) / (self.high - self.low)))


@dataclass(frozen=True)
class Rope:
    """f_p = theta^(-p / P), divided by `factor` (in `bands`: the low ones) and by `divisors`."""

    theta: float
    factor: float = 1.0
    bands: Bands | None = None
    divisors: tuple[float, ...] | None = None

    def frequencies(self, pairs: int) -> tuple[float, ...]:
        """Of each pair; UserError if there are none for this base."""
        if self.theta < 1:
            raise UserError(f"the base of RoPE is {self.theta:g}; it must be at least 1")
        found = [self._scaled(self.theta ** (-p / pairs)) for p in range(pairs)]
        if self.divisors is not None:
            found = [f / divisor for f, divisor in zip(found, self.divisors, strict=True)]
        return tuple(found)

    def _scaled(self, frequency: float) -> float:
        high = 0.0 if self.bands is None else self.bands.share(frequency)
        return frequency * (high + (1 - high) / self.factor)


def from_config(config: Settings) -> Rope:
    """Of a Hugging Face folder.

    The base is a key of its own, or since transformers 5 one of `rope_parameters`. These also have
    the scaling, which was `rope_scaling` before.
    """
    rope = Rope(config.number("rope_theta", 10_000.0))
    for key in ("rope_scaling", "rope_parameters"):
        table = config.table.get(key) or {}
        if not isinstance(table, dict):
            raise config.error(key, "must be a table")
        if any(isinstance(value, dict) for value in table.values()):
            raise config.error(key, "RoPE that differs between layers cannot be imported")
        inner = Settings(config.path, {f"{key}.{name}": value for name, value in table.items()})
        partial = f"{key}.partial_rotary_factor"
        inner.require(partial, (1,), "RoPE of a part of the channels")
        theta = inner.number(f"{key}.rope_theta", rope.theta)
        kind = table.get("rope_type", table.get("type", _PLAIN))
        if kind not in (_PLAIN, _LINEAR, _LLAMA3):
            raise config.error(
                key, f"only RoPE scaled by {_LINEAR!r} or {_LLAMA3!r} can be imported"
            )
        if kind == _PLAIN:
            rope = Rope(theta, rope.factor, rope.bands)
            continue
        if rope.factor != 1:
            raise config.error(key, "rope_scaling is set too; remove one of them")
        bands = _bands(inner, key) if kind == _LLAMA3 else None
        rope = Rope(theta, _factor(inner, f"{key}.factor"), bands)
    return rope


def _bands(settings: Settings, key: str) -> Bands:
    low, high = f"{key}.low_freq_factor", f"{key}.high_freq_factor"
    context = f"{key}.original_max_position_embeddings"
    settings.whole(context)
    bands = Bands(settings.number(low), settings.number(high), settings.number(context))
    if not bands.low < bands.high:
        raise settings.error(high, f"must be above {low} = {bands.low:g}")
    return bands


def _factor(settings: Settings, key: str, default: float | None = None) -> float:
    factor = settings.number(key, default)
    if factor < 1:
        raise settings.error(key, "must be at least 1")
    return factor


def from_gguf(source: Source, prefix: str, pairs: int) -> Rope:
    """Of a GGUF file: its keys, and the divisors that it may have as a tensor."""
    found, kind = source.settings, f"{prefix}.rope.scaling.type"
    found.require(kind, ("none", _LINEAR), "RoPE scaled in another way than 'linear'")
    key, old = f"{prefix}.rope.scaling.factor", f"{prefix}.rope.scale_linear"
    factor = _factor(found, key, _factor(found, old, 1.0))
    if found.table.get(kind) == "none" and factor != 1:
        raise found.error(kind, f"contradicts the factor of {factor:g} by which RoPE is scaled")
    theta = found.number(f"{prefix}.rope.freq_base", 10_000.0)
    return Rope(theta, factor, divisors=_divisors(source, pairs))


def _divisors(source: Source, pairs: int) -> tuple[float, ...] | None:
    if FACTORS not in source.shapes:
        return None
    where = f"{str(source.path)!r}: tensor {FACTORS!r}"
    if source.shapes[FACTORS] != (pairs,):
        raise UserError(f"{where} has the shape {source.shapes[FACTORS]}, not ({pairs},)")
    divisors = tuple(source.read(FACTORS).tolist())
    if min(divisors) < 1:
        raise UserError(f"{where} holds {min(divisors):g}; its values must be at least 1")
    return divisors
