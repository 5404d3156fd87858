"""A compressor of one small layer, and what tests do to it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gaugelasso.axes import named_tensors, spread
from gaugelasso.compress.compressor import Compressor, CompressorOptions
from gaugelasso.models import Transformer, TransformerSpec

SPEC = TransformerSpec.uniform(
    width=6, layers=1, heads=2, d_k=6, d_v=4, d_f=5, length=5, inputs=7, outputs=7
)
TOKENS = torch.randint(7, (3, 5), generator=torch.Generator().manual_seed(0))
FILTERS = "operators.mlp_0.d_f"


def start(
    probe: Callable[[Transformer], float] | None = None, target: float = 1e9, **options: Any
) -> Compressor:
    model = Transformer(SPEC).double()
    return Compressor(
        model,
        target,
        CompressorOptions(**({"lr": 1e-3} | options)),
        (lambda: probe(model)) if probe else None,
    )


def task_loss(model: Any) -> Tensor:
    logits = model(TOKENS)
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), TOKENS.flatten())


def train(compressor: Compressor, steps: int) -> list[Any]:
    events = []
    for _ in range(steps):
        loss = task_loss(compressor.model)
        loss.backward()
        events.append(compressor.step(loss))
    return events


@torch.no_grad()
def fade_(compressor: Compressor, name: str, indices: list[int], norms: bool = True) -> None:
    """Bring indices of an axis within the trust of zero, with their share of the normalisers."""
    table, tensors = compressor.state.table, named_tensors(compressor.model)
    shares = {norm.weight for norm in table.norms} if norms else set()
    axis = table[name]
    factor = torch.ones(compressor.widths[name]).double()
    factor[indices] = 1e-6
    riders = tuple(slot for slot in axis.riders if slot.tensor in shares)
    for slot in axis.side_a + axis.side_b + riders:
        tensors[slot.tensor].mul_(spread(factor, slot, tensors))
