"""Small models, and what a decision keeps of them."""

from torch import Tensor

from gaugelasso.compress.drop import (
    Decision,
)
from gaugelasso.models import Transformer, TransformerSpec


def uniform(width: int = 3) -> Transformer:
    return Transformer(
        TransformerSpec.uniform(
            width=width, layers=1, heads=1, d_k=4, d_v=2, d_f=3, length=4, inputs=5, outputs=3
        )
    )


def kept(decision: Decision | None, name: str) -> list[int]:
    assert decision is not None
    keep: Tensor = decision.keeps[name]
    return keep.nonzero().squeeze(1).tolist()
