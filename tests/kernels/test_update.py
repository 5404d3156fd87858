"""What follows the backward pass in its fused form, against the plain one.

On a GPU as compiled; elsewhere by Triton's interpreter, where Triton is installed.
"""

import copy
import importlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gaugelasso import Compressor, kernels
from gaugelasso.axes import AxisTable, Norm, named_tensors
from gaugelasso.compress import gauge
from gaugelasso.compress.flat import FlatStore
from gaugelasso.compress.optim import CoupledOptimizer, MatrixPlan
from gaugelasso.compress.options import CompressorOptions
from gaugelasso.compress.solver import RhoSolver
from gaugelasso.compress.step_scalars import StepScalars
from gaugelasso.models import Transformer, TransformerSpec
from tests.kernels import CUDA, DEVICE
from tests.toys import Toy, chain, pairs, penalise

triton = pytest.importorskip("triton")

from gaugelasso.kernels import dispatch  # noqa: E402
from gaugelasso.kernels.gpu import optim  # noqa: E402

NAN, INF = float("nan"), float("inf")
# How near updates of matrices are, in terms of the largest: Newton-Schulz takes small differences
# along, and on a GPU reckons in bfloat16.
ORTHOGONAL = 5e-2 if CUDA else 1e-4

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::UserWarning", "ignore::RuntimeWarning"
)


@pytest.fixture(autouse=True)
def fuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused forms wherever they are asked for, also by the interpreter on a CPU."""
    for name in () if CUDA else ("gauge", "optim", "step_scalars", "penalty"):
        module = importlib.import_module(f"gaugelasso.compress.{name}")
        monkeypatch.setattr(module, "fused_flat", lambda _: not dispatch._plain)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def scalar(value: float) -> Tensor:
    return torch.tensor(value, device=DEVICE)


@torch.no_grad()
def both(work: Callable[[], list[Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """What `work`, from the same start, returns in its plain and in its fused form."""
    results = []
    for plain in (True, False):
        with kernels.reference_kernels(plain):
            results.append([tensor.clone() for tensor in work()])
    return list(zip(*results, strict=True))


def near(plain: Tensor, fused: Tensor, share: float = 1e-5) -> None:
    """As near as the order of a sum allows, and no number where the other is none."""
    assert plain.dtype == fused.dtype
    size = plain.float().nan_to_num(0, 0, 0).abs().max() if plain.numel() else 0
    assert torch.allclose(fused, plain, rtol=share, atol=share * float(size), equal_nan=True)


def test_flat_storage_is_fused_in_float32_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels take every pointer for one of float32."""
    monkeypatch.setattr(dispatch, "fused", lambda _: True)
    kinds = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    assert [dispatch.fused_flat(draw(1).to(kind)) for kind in kinds] == [True, False, False, False]


# --- scalars ----------------------------------------------------------------------------


def step_scalars(
    solver: RhoSolver,
    smoothing: float = 0.0,
    norm_rate: float = 0.01,
    norms_pause: bool = False,
    **state: float,
) -> StepScalars:
    result = StepScalars(draw(1), solver, smoothing, norm_rate, norms_pause)
    for name, value in {"lr": 1e-3, **state}.items():
        getattr(result, name).fill_(value)
    return result


CONSERVATIVE = RhoSolver("conservative", 1.0)


@pytest.mark.parametrize("seen", [0, 7])
@pytest.mark.parametrize("smoothing", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("loss", [2.5, -1.0, NAN, INF, -INF])
def test_judged_by_the_loss(loss: float, smoothing: float, seen: int) -> None:
    gradient = draw(3000)
    state = {"smoothed": 2.0 * (seen > 0), "seen": seen, "skipped": 4, "failing": 1, "streak": 3}

    def work() -> list[Tensor]:
        mine = step_scalars(CONSERVATIVE, smoothing, **state)
        return [mine.check_finite_(scalar(loss), gradient), *mine.state().values()]

    for plain, fused in both(work):
        near(plain, fused, 1e-6)


@pytest.mark.parametrize("size", [1, 2048, 5000])
@pytest.mark.parametrize("value", [0.0, 1.5e19, 1e20, -1e20, NAN, INF])
def test_judged_by_the_gradient(value: float, size: int) -> None:
    """Also by its square, each element's once; failures in a row are counted."""
    bad = 0 * draw(size)
    bad[-1] = value
    sound = abs(value) < 1.8e19

    def work() -> list[Tensor]:
        mine = step_scalars(CONSERVATIVE)
        judged = [mine.check_finite_(scalar(1.0), gradient) for gradient in (bad, bad, draw(size))]
        assert [bool(one) for one in judged] == [sound, sound, True]
        assert [float(mine.failing), float(mine.streak)] == [0, 0 if sound else 2]
        return [*judged, *mine.state().values()]

    for plain, fused in both(work):
        assert torch.equal(plain, fused)


STATES = [
    {},
    {"pressed": 1, "begun": 1},
    {"pressure": 0.25},
    {"pressure": 0, "begun": 1},
    {"smoothed": 1.5},  # beyond the target
    {"smoothed": 1.0},  # no margin
    {"smoothed": -3.0},
    {"smoothed": NAN},
    {"lr": 0},
]
PENALTIES = {
    "opposed": lambda m, r: -m.sign() * r.abs(),
    "helped": lambda m, r: m.sign() * r.abs(),
    "mixed": lambda m, r: r,
    "none": lambda m, r: 0 * r,
    "no number": lambda m, r: r * NAN,
}


@pytest.mark.parametrize("sound", [True, False])
@pytest.mark.parametrize("kind", PENALTIES)
@pytest.mark.parametrize("method", ["conservative", "sign_step", "fixed"])
def test_pressed(method: str, kind: str, sound: bool) -> None:
    momentum = draw(3000, seed=1)
    momentum[::7] = 0
    gradient = PENALTIES[kind](momentum, draw(3000, seed=2))
    for state in STATES:
        for pause in (False, True):

            def work(state: dict[str, float] = state, pause: bool = pause) -> list[Tensor]:
                solver = RhoSolver(method, 1.0, 0.3)
                mine = step_scalars(solver, norms_pause=pause, **{"smoothed": 0.4} | state)
                rates = mine.solve_rho_(momentum, gradient, torch.tensor(sound, device=DEVICE))
                return [*rates, *mine.state().values()]

            for plain, fused in both(work):
                near(plain, fused, 1e-4)  # differences of sums


@pytest.mark.parametrize("programs", [4, 512])
def test_sums(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more elements than all programs take at once; the same every time."""
    monkeypatch.setattr("gaugelasso.kernels.gpu.step_scalars.PARTS", programs)
    momentum, gradient = draw(30_001, seed=1), draw(30_001, seed=2)

    def work() -> list[Tensor]:
        mine = step_scalars(RhoSolver("sign_step", 1.0))
        mine.check_finite_(scalar(0.5), 1e17 * gradient)
        mine.solve_rho_(momentum, gradient, torch.tensor(True, device=DEVICE))
        return [mine.rho, mine.skipped]

    results = [both(work) for _ in range(10 if CUDA else 2)]
    assert len({float(fused) for (_, fused), _ in results}) == 1
    for pair in results[0]:
        near(*pair)


# --- optimizer --------------------------------------------------------------------------


def matrices(*shapes: tuple[int, int]) -> FlatStore:
    tensors = {f"m{i}": draw(*shape, seed=i) for i, shape in enumerate(shapes)}
    table = AxisTable(axes=(), matrices=dict.fromkeys(tensors, 1))
    model = Toy(table, vector=draw(1300), **tensors).float().to(DEVICE)
    return FlatStore(model, table)


@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("beta", [0.95, 0.3, 0.0])
@pytest.mark.parametrize("kind", ["muon", "adam"])
def test_optimizer(
    kind: str, beta: float, weight_decay: float, bounded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps along two penalties, with one between them that is not sound."""
    # So that the largest matrix has more.
    monkeypatch.setattr("gaugelasso.kernels.gpu.optim.PARTS", 2)
    store = matrices((3, 5), (40, 40), (5, 3), (31, 70))
    start, lr = store.weight.clone(), 0.01
    names = {name: 1 for name in store.segments if name != "vector"}

    def work() -> list[Tensor]:
        store.weight.copy_(start)
        optimizer = CoupledOptimizer(store, names, kind, beta, 0.99, weight_decay)
        rates = lr * draw(len(optimizer.second)).sigmoid() if bounded else None
        gradients = []
        for seed, rho in enumerate((0.0, 0.5, 3.0)):
            sound = seed != 1
            store.grad.copy_(draw(len(store), seed=seed))
            store.grad[5] *= 1 if sound else NAN
            optimizer.observe_(torch.tensor(sound, device=DEVICE))
            rate = scalar(lr * sound)
            elementwise = rates * sound if rates is not None else None
            optimizer.step_(draw(len(store), seed=seed + 9), scalar(rho), rate, elementwise)
            gradients.append(store.grad.clone())
        state = optimizer.momentum, optimizer.second, optimizer.decay
        return [(store.weight - start) / lr, *gradients, *state]

    (plain, fused), *state = both(work)
    end = store.matrix_end if kind == "muon" else 0
    near(plain[:end], fused[:end], ORTHOGONAL)
    near(plain[end:], fused[end:], 1e-4)
    for plain, fused in state:
        near(plain, fused)


def test_a_step_before_any_gradient_divides_by_nothing() -> None:
    store = matrices((3, 5))

    def work() -> list[Tensor]:
        optimizer = CoupledOptimizer(store, {"m0": 1})
        optimizer.observe_(torch.tensor(False, device=DEVICE))
        optimizer.step_(draw(len(store)), scalar(0.0), scalar(0.1))
        return [store.weight, optimizer.decay]

    for plain, fused in both(work):
        assert torch.equal(plain, fused)
        assert fused.isfinite().all()


def test_a_step_without_bounds_is_not_hidden() -> None:
    """Weights that are no numbers are found out; those clipped to a step would not be."""
    store = matrices((3, 5))
    start = store.weight.clone()

    def work() -> list[Tensor]:
        store.weight.copy_(start)
        optimizer = CoupledOptimizer(store, {"m0": 1})
        optimizer.step_(draw(len(store)), scalar(INF), scalar(0.1))
        return [store.weight]

    for plain, fused in both(work):
        assert plain.isnan().all()
        assert fused.isnan().all()


def test_without_vectors_there_are_matrices_alone() -> None:
    """A tail of no elements."""
    model = Toy(AxisTable(axes=(), matrices={"m": 1}), m=draw(4, 6)).float().to(DEVICE)
    store = FlatStore(model, model.declared)
    start = store.weight.clone()

    def work() -> list[Tensor]:
        store.weight.copy_(start)
        optimizer = CoupledOptimizer(store, {"m": 1})
        store.grad.copy_(draw(24, seed=1))
        optimizer.observe_(torch.tensor(True, device=DEVICE))
        optimizer.step_(draw(24, seed=2), scalar(0.1), scalar(0.1))
        return [(store.weight - start) / 0.1]

    for plain, fused in both(work):
        near(plain, fused, ORTHOGONAL)


@pytest.mark.parametrize("parts", [2, 256])
@pytest.mark.parametrize("rho", [0.0, 0.7])
def test_matrices_come_and_go(rho: float, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded batches in and out, as they are, without what happens to them in between."""
    monkeypatch.setattr(optim, "PARTS", parts)
    store = matrices((31, 70), (20, 65), (130, 33), (3, 5), (1, 1))
    plan = MatrixPlan(store, {name: 1 for name in store.segments if name != "vector"})
    momentum, gradient = draw(len(store), seed=1), draw(len(store), seed=2)
    aim = momentum + rho * gradient
    expected, weight, lr = store.weight.clone(), store.weight.clone(), 0.3
    padding = 0
    for number, bucket in enumerate(plan.buckets):
        batch, shape = bucket.gather(aim), (bucket.rows, bucket.cols)
        padding += int((batch == 0).sum())
        norms = batch.norm(dim=(1, 2), keepdim=True)
        drive = momentum, gradient, scalar(rho)
        got = optim.gather(*drive, bucket.places, shape, torch.float32, 1e-20)
        near(batch / norms, got)
        update = draw(*batch.shape, seed=number)  # padding of it goes nowhere
        bucket.scatter_(expected, bucket.gather(expected) - lr * bucket.scale * update)
        optim.scatter_(weight, update, bucket.scale, scalar(lr), bucket.places)
    assert padding
    near(expected, weight)
    assert torch.equal(weight[plan.size :], store.weight[plan.size :])
    assert not torch.equal(weight, store.weight)


def test_matrices_of_zeros_have_no_norm() -> None:
    places = torch.tensor([[0, 2, 3, 3, 1]], device=DEVICE)
    zeros = torch.zeros(6, device=DEVICE)
    drive = zeros, zeros, scalar(1.0)
    assert not optim.gather(*drive, places, (2, 3), torch.float32, 1e-20).any()


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("used", ["m0", "vector"])
def test_a_late_backward_pass_is_refused(used: str, plain: bool) -> None:
    """It would take the new weights for those that the loss was made with."""
    store = matrices((3, 5))
    optimizer = CoupledOptimizer(store, {"m0": 1})
    weight = next(p for p, _ in store._gradients if p.shape == store.segments[used].shape)
    loss = weight.square().sum()
    with torch.no_grad(), kernels.reference_kernels(plain):
        optimizer.step_(draw(len(store)), scalar(0.0), scalar(0.1))
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


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
