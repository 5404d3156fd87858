"""How far the outputs of an inference form are from those of the trained model."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gaugelasso.inference.model import InferenceModel
from gaugelasso.kernels import reference_kernels
from gaugelasso.models import Transformer


@dataclass(frozen=True)
class Accuracy:
    """Deviations relative to the spread of the outputs, and how often the largest output is the
    same one.
    """

    largest: float
    mean_square: float
    agreement: float

    def __str__(self) -> str:
        return (
            f"outputs off by {self.largest:.2g} of their spread at most, {self.mean_square:.2g} "
            f"on average; the likeliest is the same in {100 * self.agreement:.2f}%"
        )


@torch.inference_mode()
def compare(served: InferenceModel, model: Transformer, inputs: Tensor) -> Accuracy:
    """Compare both on inputs of the model, which must be in eval mode, on the same device."""
    with reference_kernels():
        expected = model(inputs)
    got = served(inputs).to(expected.dtype)
    off = (got - expected) / expected.std()
    return Accuracy(
        largest=float(off.abs().max()),
        mean_square=float(off.square().mean().sqrt()),
        agreement=float((got.argmax(-1) == expected.argmax(-1)).float().mean()),
    )
