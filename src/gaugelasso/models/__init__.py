"""Models that offer an axis table."""

from gaugelasso.models.spec import AttentionSpec, MlpSpec, SpecError, TransformerSpec, round_up
from gaugelasso.models.transformer import Transformer

__all__ = ["AttentionSpec", "MlpSpec", "SpecError", "Transformer", "TransformerSpec", "round_up"]
