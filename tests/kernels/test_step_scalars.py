"""The scalars of a step in their fused form, against the plain one.

On a GPU as compiled; elsewhere by Triton's interpreter, where Triton is installed.
"""

import pytest
import torch
from torch import Tensor

from gaugelasso.compress.solver import RhoSolver
from gaugelasso.compress.step_scalars import StepScalars
from tests.kernels import CUDA, DEVICE
from tests.kernels.updates import INF, MARKS, NAN, both, draw, near, scalar

triton = pytest.importorskip("triton")

pytestmark = MARKS


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
