"""The penalty as part of the optimizer's step, and as a step of its own."""

import copy

import pytest
import torch

from gaugelasso import UserError
from gaugelasso.compress.compressor import Compressor
from gaugelasso.compress.options import CompressorOptions
from gaugelasso.models import Transformer, TransformerSpec

INPUTS = torch.arange(12).view(2, 6) % 8
LR, RHO = 0.01, 3.0


def model() -> Transformer:
    spec = TransformerSpec.uniform(
        width=6, layers=1, heads=2, d_k=4, d_v=3, d_f=5, length=6, inputs=8, outputs=8
    )
    return Transformer(spec, seed=2).double()


def stepped(start: Transformer, coupling: str, rho: float) -> Compressor:
    """A model after one step with a constant rho."""
    options = CompressorOptions(lr=LR, solver="fixed", rho=rho, coupling=coupling)
    compressor = Compressor(copy.deepcopy(start), 1e9, options)
    compressor.step(lambda: compressor.model(INPUTS).square().mean())
    return compressor


@pytest.mark.parametrize("rho", [0.0, RHO])
def test_a_decoupled_penalty_is_a_step_after_plain_training(rho: float) -> None:
    start = model()
    before = Compressor(copy.deepcopy(start), 1e9).state
    gradient = before.plan.penalty.gradient(before.plan.store.weight)
    plain = stepped(start, "coupled", 0.0).state.plan.store.weight
    decoupled = stepped(start, "decoupled", rho).state.plan.store.weight
    torch.testing.assert_close(decoupled, plain - LR * rho * gradient)
    assert torch.equal(decoupled, plain) == (rho == 0)


def test_a_coupled_penalty_shares_the_step() -> None:
    """A normalised step has the size of the learning rate, however strong the penalty is."""
    start = model()
    weight = Compressor(copy.deepcopy(start), 1e9).state.plan.store.weight
    moved = {
        coupling: float(
            (stepped(start, coupling, 1e3).state.plan.store.weight - weight).abs().max()
        )
        for coupling in ("coupled", "decoupled")
    }
    assert moved["coupled"] < 3 * LR < 100 * LR < moved["decoupled"]


def test_another_coupling_is_refused() -> None:
    with pytest.raises(UserError, match=r"compress.coupling = 'loose'; choose one of: coupled, de"):
        CompressorOptions(coupling="loose")  # type: ignore[arg-type]
