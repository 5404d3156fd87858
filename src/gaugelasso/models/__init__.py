"""Networks with an axis table: the transformer, its structure as data, and decoding."""

from gaugelasso.models.rounding import round_up
from gaugelasso.models.spec import (
    AttentionSpec,
    InputKind,
    MlpSpec,
    SpecError,
    TransformerSpec,
)
from gaugelasso.models.transformer import Transformer, same_network

__all__ = [
    "AttentionSpec",
    "InputKind",
    "MlpSpec",
    "SpecError",
    "Transformer",
    "TransformerSpec",
    "round_up",
    "same_network",
]
