"""The scalars of a step, and the count of those that were skipped."""

import torch

from gaugelasso.compress.solver import RhoSolver
from gaugelasso.compress.step_scalars import StepScalars

GRADIENT = torch.ones(3)


def judged(pace: StepScalars, *losses: float) -> tuple[int, int, int]:
    for loss in losses:
        pace.check_finite_(torch.tensor(loss), GRADIENT)
    return pace.counts()


def test_skipped_steps_are_counted_until_somebody_looks() -> None:
    pace, nan = StepScalars(GRADIENT, RhoSolver("conservative", 1.0), 0.0, 0.0), float("nan")
    assert judged(pace, 1.0, nan, nan, 1.0, nan) == (3, 1, 2)
    pace.reset_streak_()
    assert pace.counts() == (3, 1, 1)
    assert judged(pace, 1.0) == (3, 0, 1)
    pace.reset_streak_()
    assert judged(pace, nan) == (4, 1, 1)
    pace.recount_(7)
    assert pace.counts() == (7, 0, 0)


def test_slow_norms_of_pretrained_models_follow_under_pressure_alone() -> None:
    """Others go on, once pressure has begun."""
    solver, sound = RhoSolver("conservative", 1.0), torch.tensor(True)
    for pause, expected in ((False, [0.0, 0.25, 0.25, 0.25]), (True, [0.0, 0.25, 0.0, 0.0])):
        pace, rates = StepScalars(GRADIENT, solver, 0.0, 0.25, pause), []
        pace.set_lr_(0.1)
        # Without pressure, with it, beyond the target, and without pressure again.
        for share, loss in ((0.0, 0.5), (1.0, 0.5), (1.0, 1.5), (0.0, 0.5)):
            pace.set_pressure_(share)
            pace.check_finite_(torch.tensor(loss), GRADIENT)
            rates.append(float(pace.solve_rho_(-GRADIENT, GRADIENT, sound)[1]))
        assert rates == expected


def test_the_state_is_the_scalars_themselves() -> None:
    """All of them, so that a checkpoint forgets none and loading reaches them."""
    pace = StepScalars(GRADIENT, RhoSolver("fixed", 1.0, 0.5), 0.0, 0.0)
    scalars = {name: value for name, value in vars(pace).items() if torch.is_tensor(value)}
    scalars.pop("loss_target")  # follows from the configuration and the course
    assert pace.state().keys() == scalars.keys()
    assert all(pace.state()[name] is value for name, value in scalars.items())
