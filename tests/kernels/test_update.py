"""What follows the backward pass in its fused form, against the plain one.

On a GPU as compiled; elsewhere by Triton's interpreter, where Triton is installed.
"""

import copy

import pytest
import torch
from torch import Tensor

from gaugelasso import Compressor, kernels
from gaugelasso.axes import Norm, named_tensors
from gaugelasso.compress import gauge
from gaugelasso.compress.options import CompressorOptions
from gaugelasso.models import Transformer, TransformerSpec
from tests.kernels import DEVICE
from tests.kernels.updates import INF, MARKS, NAN, ORTHOGONAL, both, draw, near, scalar
from tests.toys import chain, pairs, penalise

triton = pytest.importorskip("triton")

from gaugelasso.kernels import dispatch  # noqa: E402

pytestmark = MARKS


def test_flat_storage_is_fused_in_float32_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels take every pointer for one of float32."""
    monkeypatch.setattr(dispatch, "fused", lambda _: True)
    kinds = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    assert [dispatch.fused_flat(draw(1).to(kind)) for kind in kinds] == [True, False, False, False]


# --- penalty and slow weights -----------------------------------------------------------


MODELS = {
    "one group an element": lambda: pairs((3, 5000, 7), (1, 1, 1), (4, 3, 2048)),
    "two": lambda: chain(5, 30, 40, 7),
}


@pytest.mark.parametrize("form", ["symmetric", "one_sided", "product_norm"])
@pytest.mark.parametrize("calibration", ["efficiency", "geometry"])
@pytest.mark.parametrize("name", MODELS)
def test_penalty(name: str, calibration: str, form: str) -> None:
    model = MODELS[name]().float().to(DEVICE)
    with torch.no_grad():
        first = next(model.parameters())
        for slices in (first, first.T):  # on the one or the other lie the groups
            slices[0] = 1e-23  # next to no weight: no direction
            slices[1] *= 1e-4  # a rate that is bounded
    store, penalty = penalise(model, form, calibration)
    start = len(store) // 3

    def work() -> list[Tensor]:
        norms = penalty.norms(store.weight)
        gradient = penalty.gradient(store.weight, norms)
        rates = [penalty.bounded_rate(norms, scalar(lr), 0.05, start) for lr in (0.01, 0.0)]
        return [norms, gradient, penalty.gradient(store.weight), *rates]

    for plain, fused in both(work):
        near(plain, fused)
        assert fused.isfinite().all()


@pytest.mark.parametrize("name", MODELS)
def test_a_weight_that_is_no_number_spoils_its_groups(name: str) -> None:
    """Rates of theirs, too: the step that follows must not look like any other."""
    model = MODELS[name]().float().to(DEVICE)
    with torch.no_grad():
        next(model.parameters())[0, 0] = NAN
    store, penalty = penalise(model, "symmetric", "efficiency")

    def work() -> list[Tensor]:
        norms = penalty.norms(store.weight)
        rates = penalty.bounded_rate(norms, scalar(0.01), 0.05, 0)
        return [norms, penalty.gradient(store.weight, norms), rates]

    for plain, fused in both(work):
        near(plain, fused)
        assert fused.isnan().any()
        assert not fused.isnan().all()


@pytest.mark.parametrize("rate", [0.0, 0.01, 0.7, 1.0])
def test_slow_weights(rate: float) -> None:
    """Of normalisers of several widths; one has no energy, one no gain, two no numbers."""
    widths = [1, 5, 1025, 64, 3, 8, 2]
    tensors, norms = {}, []
    for k, width in enumerate(widths):
        norm = Norm(f"gain{k}", f"weight{k}", f"energy{k}")
        norms.append(norm)
        tensors |= {
            name: draw(width, seed=3 * k + i).abs()
            for i, name in enumerate((norm.gain, norm.weight, norm.energy))
        }
    tensors["energy2"][3] = tensors["gain2"][4] = 0
    tensors["energy3"].zero_()
    tensors["gain4"].zero_()
    tensors["energy5"][2] = NAN
    tensors["energy6"][1] = INF

    def work() -> list[Tensor]:
        mine = {name: tensor.clone() for name, tensor in tensors.items()}
        gauge.SlowNorms(norms, mine).follow_(scalar(rate))
        return list(mine.values())

    for (name, before), (plain, fused) in zip(tensors.items(), both(work), strict=True):
        near(plain, fused)
        if rate == 0 or name in ("weight3", "weight4", "weight5"):
            assert torch.equal(fused.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize("plain", [True, False])
def test_autograd_knows_that_slow_weights_moved(plain: bool) -> None:
    tensors = {name: draw(4, seed=k).abs() for k, name in enumerate(("gain", "slow", "energy"))}
    norms = gauge.SlowNorms([Norm("gain", "slow", "energy")], tensors)
    leaf = draw(4).requires_grad_()
    loss = (leaf * tensors["slow"]).sum()
    with torch.no_grad(), kernels.reference_kernels(plain):
        norms.follow_(scalar(0.1))
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


# --- all of them together ---------------------------------------------------------------


SPEC = TransformerSpec.uniform(
    width=6, layers=1, heads=2, d_k=4, d_v=3, d_f=5, length=7, inputs=11, outputs=13
)
OPTIONS = {
    "as usual": {},
    "sign step": {"solver": "sign_step", "loss_smoothing": 0.9, "optimizer": "adam"},
    "fixed": {"solver": "fixed", "rho": 1e-3, "penalty": "product_norm", "relative_step": 0.0},
}


def state(compressor: Compressor) -> dict[str, Tensor]:
    return {**named_tensors(compressor.model), **compressor.state_tensors()}


@pytest.mark.parametrize("name", OPTIONS)
def test_whole_updates(name: str) -> None:
    """Step by step from the same state and gradient, through unsound steps and through cuts."""
    options = CompressorOptions(lr=0.02, interval=3, trust=12.0, **OPTIONS[name])
    model = Transformer(SPEC, 1)
    model.to(DEVICE)
    plain, fused = (Compressor(copy.deepcopy(model), 2.8, options) for _ in range(2))
    spoiled = {2: "loss", 3: "gradient", 6: "gradient"}
    for step in range(9):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(11, (4, 7), generator=generator).to(DEVICE)
        with kernels.reference_kernels():  # but for the update itself
            loss = kernels.cross_entropy(plain.model(tokens), tokens)
            loss.backward()
        if spoiled.get(step) == "gradient":
            next(plain.model.parameters()).grad.view(-1)[3] = 1e30
        loss = loss.detach() * (NAN if spoiled.get(step) == "loss" else 1)
        with torch.no_grad():
            for key, tensor in state(fused).items():
                tensor.copy_(state(plain)[key])
            for mine, theirs in zip(
                fused.model.parameters(), plain.model.parameters(), strict=True
            ):
                mine.grad = theirs.grad.clone()
        before = {key: tensor.detach().clone() for key, tensor in state(plain).items()}
        for compressor in (plain, fused):
            with kernels.reference_kernels(compressor is plain):
                compressor.device_step.update_(loss)
        here, there = state(plain), state(fused)
        for key, tensor in here.items():
            if key in plain.state.table.matrices:
                ways = [(run[key].detach() - before[key]) / options.lr for run in (here, there)]
                near(*ways, ORTHOGONAL if options.optimizer == "muon" else 1e-4)
            else:
                near(tensor.detach(), there[key].detach(), 1e-4)
        moved = not torch.equal(here["embedding.table"].detach(), before["embedding.table"])
        assert moved == (step not in spoiled)
        events = [compressor.finish_step_() for compressor in (plain, fused)]
        assert len({event and tuple(event.widths.items()) for event in events}) == 1
    assert float(fused.skipped) == len(spoiled)
    assert fused.fma < fused.fma_initial
    assert fused.resume_state.finite()
