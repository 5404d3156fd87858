"""Removal by harm: what is measured, what an event cuts, and runs to a loss and to a work."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from gaugelasso.axes import named_tensors
from gaugelasso.compress.compressor import Compressor, CompressorOptions
from gaugelasso.compress.courses.choice import course_of
from gaugelasso.compress.courses.course import HARM_SHARE
from gaugelasso.compress.courses.scheduled import ScheduledCourse
from gaugelasso.compress.drop import dominates_norm
from gaugelasso.compress.events import CUT_SHARE, Drop
from gaugelasso.compress.harm import Harm, levels
from gaugelasso.compress.harm_event import DOMINATES
from gaugelasso.compress.penalty import Penalty
from gaugelasso.compress.ranking import Ranking
from gaugelasso.errors import UserError
from gaugelasso.models import Transformer
from tests.compress.small_retrieval import loss, model
from tests.tiny_runs import assert_same_run, finished, killed, rows, start

RUN: dict[str, Any] = {"compress__removal": "harm"}


def compressor(network: Transformer | None = None, **options: Any) -> Compressor:
    given = {"lr": 1e-9, "removal": "harm", "interval": 1000} | options
    made = Compressor(network or model(), 100.0, CompressorOptions(**given))
    made.model.train()
    return made


def trained(made: Compressor, steps: int) -> Compressor:
    for step in range(steps):
        at = loss(made.model, made.steps + step)
        at.backward()
        made.step(at.detach())
    return made


def harm_of(made: Compressor) -> Harm:
    assert made.state.harm is not None
    return made.state.harm


def test_a_step_computes_no_penalty_and_knows_whether_there_is_margin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*given: Any) -> None:
        raise AssertionError("a pass over all weights that nothing needs")

    monkeypatch.setattr(Penalty, "gradient", refuse)
    made = compressor()
    for target, margin in ((100.0, True), (1e-6, False), (100.0, True)):
        made.set_loss_target_(target)
        trained(made, 1)
        assert bool(made.rho > 0) == margin


# --- what is measured ----------------------------------------------------------------------


def test_harm_is_the_mean_square_of_the_slope_of_the_loss() -> None:
    """By a finite difference of the scale of single channels, over three batches."""
    made = trained(compressor(), 3)
    found, network = harm_of(made).by_axis(), made.model
    assert isinstance(network, Transformer)
    for axis in made.state.table.axes:
        if axis.linked() or not axis.gauge:
            continue
        (slot, *others) = axis.side_a
        squares = []
        for step in range(3):
            slopes = []
            for sign in (1, -1):
                saved = {s.tensor: named_tensors(network)[s.tensor].clone() for s in axis.side_a}
                with torch.no_grad():
                    for each in (slot, *others):
                        tensor = named_tensors(network)[each.tensor]
                        tensor.select(each.dim, 0).mul_(1 + sign * 1e-5)
                    slopes.append(float(loss(network, 2 * step)))
                    for name, values in saved.items():
                        named_tensors(network)[name].copy_(values)
            squares.append(((slopes[0] - slopes[1]) / 2e-5) ** 2)
        assert float(found[axis.name][0]) == pytest.approx(sum(squares) / 3, rel=1e-3, abs=1e-12)


def test_harm_does_not_depend_on_the_gauge() -> None:
    one, other = model(), model()
    with torch.no_grad():
        mlp = next(part for name, part in other.operators.items() if "mlp" in name)
        mlp.up[:, 3].mul_(100.0)
        mlp.down[3].div_(100.0)
    found = [harm_of(trained(compressor(each), 2)).by_axis() for each in (one, other)]
    for name, values in found[0].items():
        torch.testing.assert_close(found[1][name], values, rtol=1e-5, atol=1e-15)


def test_a_step_with_a_loss_that_is_not_finite_leaves_it_as_it_was() -> None:
    made = trained(compressor(), 2)
    before, seen = harm_of(made).values.clone(), float(harm_of(made).seen)
    at = loss(made.model)
    (at * math.nan).backward()
    made.step(at.detach() * math.nan)
    assert torch.equal(harm_of(made).values, before)
    assert float(harm_of(made).seen) == seen == 2


def test_old_steps_fade() -> None:
    made = compressor()
    harm, plan = harm_of(made), made.state.plan
    weight, sound = plan.store.weight, torch.tensor(True)
    for _ in range(3):
        harm.observe_(plan.penalty, weight, torch.ones_like(weight), sound)
    start = harm.values.clone()
    for _ in range(400):
        harm.observe_(plan.penalty, weight, torch.zeros_like(weight), sound)
    assert float(start.max()) > 0
    assert float(harm.values.max()) < 1e-3 * float(start.max())


# --- an event -------------------------------------------------------------------------------


def test_an_event_cuts_the_least_harm_per_price_and_little_of_it() -> None:
    made = trained(compressor(), 5)
    state = made.state
    shares = {
        name: values.numpy() / state.prices[name]
        for name, values in harm_of(made).by_axis().items()
    }
    fma, event = made.fma, made.event_()
    # The last channel may be a large one in so small a model.
    assert (1 - CUT_SHARE) * fma - 100 < made.fma <= (1 - CUT_SHARE) * fma
    assert event.splits == 0
    gone = sum(event.dropped.values())
    assert gone
    least = sorted(value for values in shares.values() for value in values.tolist())
    # A few more may go with them (the cascade), and a few stay: what a normaliser depends on.
    worst = max(float(shares[name].min()) for name in event.dropped)
    assert worst <= least[min(3 * gone, len(least) - 1)]


def test_what_stays_keeps_its_harm() -> None:
    made = trained(compressor(), 3)
    before = harm_of(made).by_axis()
    made.event_()
    after = harm_of(made).by_axis()
    assert any(len(after[name]) < len(before[name]) for name in after)
    for name, values in after.items():
        assert set(values.tolist()) <= set(before[name].tolist())


def test_normalisers_keep_their_levels() -> None:
    """The sites that stay take over what the others had."""
    made = trained(compressor(), 3)
    tensors = named_tensors(made.model)
    before = {name: float(level) for name, level in levels(made.state.table, tensors).items()}
    for axis in made.state.table.axes:
        if axis.kind == "d_ai":  # what attention reads goes first
            harm_of(made).values[made.state.plan.penalty.ranges[axis.name].side("a")] = 0
    for _ in range(2):
        made.event_()
    tensors = named_tensors(made.model)
    after = {name: float(level) for name, level in levels(made.state.table, tensors).items()}
    read = [norm.weight for norm in made.state.table.norms]
    assert any(len(tensors[name]) < 12 for name in read)
    for name in read:
        assert after[name] == pytest.approx(before[name], rel=1e-9)


def test_no_event_goes_below_the_work_target_by_more_than_a_channel() -> None:
    made = trained(compressor(), 3)
    made.fma_target = 0.99 * made.fma
    made.event_()
    assert 0.97 * made.fma_initial < made.fma <= made.fma_target


def test_a_cut_that_costs_too_much_is_halved_and_then_given_up() -> None:
    made = trained(compressor(), 3)
    fma, losses = made.fma, iter([1.0, 9.0, 9.0, 1.0])
    made.probe = lambda: next(losses)
    made.set_loss_target_(100.0, allowance=0.1)
    event = made.event_()
    assert event.undone == {}
    assert (1 - CUT_SHARE) * fma < made.fma < fma

    fma, losses = made.fma, iter([1.0] + [9.0] * 10)
    before = {name: tensor.clone() for name, tensor in named_tensors(made.model).items()}
    harms = harm_of(made).values.clone()
    event = made.event_()
    assert event.undone == {"cut": 9.0}
    assert made.fma == fma
    assert all(
        torch.equal(tensor, before[name]) for name, tensor in named_tensors(made.model).items()
    )
    # What was tried is tried less next time.
    assert bool((harm_of(made).values >= harms).all())
    assert bool((harm_of(made).values > harms).any())


def test_hooks_keep_what_they_veto() -> None:
    made = trained(compressor(), 3)
    seen: list[Drop] = []

    @made.on_drop
    def veto(drop: Drop) -> bool:
        seen.append(drop)
        return False

    assert not made.event_().dropped
    assert seen
    assert all(drop.indices for drop in seen)


def test_sites_that_set_the_scale_of_a_normaliser_stay() -> None:
    network = model()
    part = next(iter(network.operators.values()))
    made = trained(compressor(network), 2)
    with torch.no_grad():  # one site is nearly all of what the normaliser sees
        part.read.energy.fill_(1e-6)
        part.read.energy[4] = 1.0
        harm_of(made).values.zero_()
    name = next(axis.name for axis in made.state.table.axes if axis.kind == "d_ai")
    held = dominates_norm(made.state.table, made.state.readable(), times_mean=DOMINATES)
    assert held[name].nonzero().flatten().tolist() == [4]
    ranking = Ranking(made.state, harm_of(made).by_axis(), held)
    assert bool(ranking.keeps(len(ranking))[name][4])


# --- options and courses ----------------------------------------------------------------------


def test_an_unknown_removal_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"compress\.removal = 'magic'; choose one of: pressure, harm"
    ):
        CompressorOptions(removal="magic")  # type: ignore[arg-type]


def test_channels_are_not_exchanged_without_pressure() -> None:
    with pytest.raises(UserError, match=r"compress\.exchange = 50: .*removal = 'pressure'"):
        CompressorOptions(removal="harm", exchange=50)


def test_weights_take_the_steps_of_plain_training() -> None:
    """With a margin, pressure changes the weights; a removal by harm does not."""
    after = {}
    for removal, target in (("harm", 100.0), ("pressure", -100.0), ("pressure", 100.0)):
        options = CompressorOptions(lr=1e-3, removal=removal, interval=1000)  # type: ignore[arg-type]
        made = Compressor(model(), target, options)
        made.model.train()
        after[removal, target] = trained(made, 4).state.plan.store.weight.clone()
    assert torch.equal(after["harm", 100.0], after["pressure", -100.0])
    assert not torch.equal(after["harm", 100.0], after["pressure", 100.0])


def scheduled(**fields: Any) -> ScheduledCourse:
    course = course_of(None, None, 50.0, 400, 0.01, by_harm=True)
    assert isinstance(course, ScheduledCourse)
    for name, value in fields.items():
        setattr(course, name, value)
    return course


def test_a_work_course_cuts_where_the_work_is_behind_its_schedule() -> None:
    course = scheduled()
    assert course.pressed_loss(100) is None  # nothing is known yet
    course.observe([3.0] * 40)
    course.advance(40, 100.0, lambda thorough: 3.0)
    halfway = (course.warmup + 200) // 2
    course.advance(halfway, 100.0, lambda thorough: 3.0)
    pressed = course.pressed_loss(halfway)
    assert pressed is not None
    assert pressed > 6.0  # above any loss of a batch
    assert course.allowance(pressed) > 0.06
    assert course.cut_share == pytest.approx(1 - course.scheduled(halfway) / 100)
    course.advance(halfway, 60.0, lambda thorough: 3.0)
    assert course.pressed_loss(halfway) is None
    assert course.allowance(3.0) == pytest.approx(0.06)
    assert course.cut_share == CUT_SHARE
    assert course.pressed_loss(course.warmup - 1) is None


def test_a_course_to_a_loss_allows_each_event_a_share_of_it() -> None:
    course = course_of(3.6, None, 0.0, 400, 0.01, by_harm=True)
    course.observe([3.4] * 60)  # the first loss of a pretrained model is below the named one
    assert course.pressed_loss(100) == 3.6
    assert course.allowance(3.6) == pytest.approx(HARM_SHARE * 3.6)


# --- whole runs -----------------------------------------------------------------------------


def test_a_run_to_a_loss_gets_smaller_and_resumes_to_the_last_bit(tmp_path: Path) -> None:
    whole = finished(tmp_path, "whole", **RUN)
    events = rows(whole, "events.jsonl")
    cuts = [event["step"] for event in events if event["dropped"]]
    assert cuts
    broken = killed(tmp_path, cuts[0] + 3, "killed", **RUN)
    trainer = start(tmp_path, "killed", "resume", **RUN)
    trainer.run()
    assert_same_run(whole, broken)
