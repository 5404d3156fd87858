"""The operators of a structure as data, and checks of their parts.

Each check raises SpecError with what would be right.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from gaugelasso.models.json_fields import SpecError, checked_fields, shown

# Larger than any machine can hold, and small enough for an int64 tensor.
LARGEST = 2**40
# Keys that structures of earlier versions do not have, and what their absence means.
LATER_OF_ATTENTION = {"window": None}


@dataclass(frozen=True)
class AttentionSpec:
    """One attention operator.

    `keys` is the number of removable key indices: RoPE pairs where `frequencies`
    are given, single channels otherwise. `scale` is the softmax scale of the initial width. With a
    `window`, a query sees that many keys at most, up to its own.
    """

    depth: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    heads: int
    kv_heads: int
    keys: int
    values: int
    scale: float
    frequencies: tuple[float, ...] | None = None
    window: int | None = None
    kind: Literal["attention"] = "attention"

    @property
    def name(self) -> str:
        return f"attention_{self.depth}"


@dataclass(frozen=True)
class MlpSpec:
    """One MLP with `filters` hidden channels; `TransformerSpec.mlp` says of which kind."""

    depth: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    filters: int
    kind: Literal["mlp"] = "mlp"

    @property
    def name(self) -> str:
        return f"mlp_{self.depth}"


OperatorSpec = AttentionSpec | MlpSpec


def operator_from_dict(data: Any) -> OperatorSpec:
    """Build from JSON data; SpecError names a missing, unknown or wrong key."""
    kind = data.get("kind") if isinstance(data, Mapping) else None
    if kind == "attention":
        given = ("attention operator", AttentionSpec, data, LATER_OF_ATTENTION)
        return AttentionSpec(**checked_fields(*given))
    if kind == "mlp":
        return MlpSpec(**checked_fields("mlp operator", MlpSpec, data))
    raise SpecError(f"operator kind {kind!r} is neither 'attention' nor 'mlp'")


def check_operator(operator: OperatorSpec, width: int, causal: bool) -> None:
    """The operator fits a stream of this width."""
    check_reach(f"{operator.name} reads", operator.reads, width)
    check_reach(f"{operator.name} writes", operator.writes, width)
    if isinstance(operator, MlpSpec):
        positive(f"{operator.name} d_f", operator.filters)
        return
    for label in ("heads", "kv_heads", "keys", "values"):
        positive(f"{operator.name} {label}", getattr(operator, label))
    if operator.heads % operator.kv_heads:
        raise SpecError(
            f"{operator.name}: heads = {operator.heads} is not a multiple of "
            f"kv_heads = {operator.kv_heads}"
        )
    if operator.frequencies is not None and len(operator.frequencies) != operator.keys:
        raise SpecError(
            f"{operator.name}: {len(operator.frequencies)} frequencies for "
            f"{operator.keys} RoPE pairs"
        )
    if operator.window is not None:
        positive(f"{operator.name} window", operator.window)
        if not causal:
            raise SpecError(f"{operator.name}: only a causal model can have a window")


def positive(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SpecError(f"{name} = {value!r}: must be a whole number of at least 1")
    if value > LARGEST:
        raise SpecError(f"{name} = {shown(value)}: must be at most {LARGEST}")


def check_reach(who: str, sites: tuple[int, ...], width: int) -> None:
    positive(f"{who}: number of sites", len(sites))
    for site in sites:
        if not isinstance(site, int) or not 0 <= site < width:
            raise SpecError(f"{who}: site {site!r} is outside 0..{width - 1}")
    if len(set(sites)) != len(sites):
        raise SpecError(f"{who}: a site appears twice")
