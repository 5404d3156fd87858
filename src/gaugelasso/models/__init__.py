"""Networks with an axis table: the transformer, its structure as data, and decoding."""

from gaugelasso.models.json_fields import SpecError
from gaugelasso.models.operator_spec import AttentionSpec, MlpSpec
from gaugelasso.models.residual import SiteWriter, SlowNorm, centred, stream_axis
from gaugelasso.models.rounding import round_up
from gaugelasso.models.spec import InputKind, TransformerSpec
from gaugelasso.models.transformer import Transformer, same_network

__all__ = [
    "AttentionSpec",
    "InputKind",
    "MlpSpec",
    "SiteWriter",
    "SlowNorm",
    "SpecError",
    "Transformer",
    "TransformerSpec",
    "centred",
    "round_up",
    "same_network",
    "stream_axis",
]
