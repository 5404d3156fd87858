"""CoFi: a masked step, as formulas, on the device alone, and replayed."""

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from torch.profiler import ProfilerActivity, profile

from gaugelasso.baselines.cofi import CofiPlan
from gaugelasso.baselines.cofi_masks import Masks
from gaugelasso.baselines.cofi_run import CofiTrainer, cofi_settings
from gaugelasso.baselines.cofi_step import CofiStep
from gaugelasso.baselines.source import Source
from gaugelasso.models import Transformer
from gaugelasso.training.step import TrainingStep
from tests.baselines.cofi_runs import plan_of, start
from tests.baselines.replayed import ReplayedStep
from tests.tiny_runs import read, rows


@pytest.mark.parametrize("failing", [1, 3])
def test_steps_without_a_finite_loss_do_not_spoil_the_masks(
    run: Path, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is left out. Three are a failure: back to the newest checkpoint, masks included."""
    target, losses = 0.7 * read(run / "summary.json")["fma_final"], CofiStep.losses
    calls = iter(range(1000))
    monkeypatch.setattr(CofiStep, "losses", lambda *given: tuple(
        value * (math.nan if 30 <= now < 30 + failing else 1.0)
        for now in [next(calls)] for value in losses(*given)
    ))  # fmt: skip
    changes = {"train.skip_limit": "3", "train.checkpoint_every": "20"}
    trainer = start(run, replace(plan_of(target), prune=120), "cofi", changes=changes)
    begun: list[list[float]] = []
    begin = trainer.cofi._begin

    def watched() -> None:
        begun.append(list(trainer.cofi._saved))
        begin()

    trainer.cofi._begin = watched  # type: ignore[method-assign]
    summary = trainer.run()
    assert summary["skipped_steps"] == failing
    assert summary["fma_final"] <= 1.02 * target
    assert all(math.isfinite(each) for each in trainer.cofi.control)
    if failing == 1:
        assert begun == [[]]
        return
    assert [row["returned_to"] for row in rows(trainer.folder.path, "events.jsonl")
            if row.get("returned_to") is not None] == [20]  # fmt: skip
    assert begun[0] == []
    assert len(begun) == 2
    assert all(math.isfinite(each) for each in begun[1])
    assert len(begun[1]) > 10


def test_a_step_minimises_the_shares_of_loss_and_distance(run: Path) -> None:
    trainer = start(run, replace(plan_of(300), distill=0.25), "cofi")
    step = trainer.state.step
    assert isinstance(step, CofiStep)
    step.load_(0)
    inputs, targets, taught = step.inputs[0], step.targets[0], step.distillation
    with torch.no_grad():
        trainer.model.get_parameter("classifier.read.gain").mul_(1.5)  # away from the teacher
        loss, total = (float(value) for value in step.losses(inputs, targets, 0))
        outputs = step.model(inputs)
        distance = float(taught.loss(outputs, taught.teacher(inputs)))
        assert loss == pytest.approx(float(trainer.task.loss(outputs, targets)))
    assert total == pytest.approx(0.75 * loss + 0.25 * distance)
    assert distance > 1e-3
    # The hook of every training step is called here too, once for each micro-batch.
    shares: list[float] = []
    step.add_gradients_ = shares.append  # type: ignore[method-assign]
    step.gradients()
    assert shares == [1.0] * len(step.inputs)
    trainer.folder.close()


class WrittenOut:
    """The masked step as formulas, without fixed tensors: what a step must compute to the last bit.

    Its own masks and multipliers are a copy of those of `step`, with optimizers of their own.
    """

    def __init__(self, step: CofiStep, masks: Masks, rate: float):
        self.step, self.masks = step, masks
        self.logits = masks.logits.detach().clone().requires_grad_()
        self.multipliers = masks.multipliers.detach().clone().requires_grad_()
        self.optimizers = (
            torch.optim.Adam([self.logits], lr=rate),
            torch.optim.Adam([self.multipliers], lr=rate, maximize=True),
        )

    def losses(self, inputs: Tensor, targets: Tensor, micro: int) -> tuple[Tensor, Tensor]:
        step, masks, share = self.step, self.masks, self.step.distillation.share
        seed = replace(step.draw(step.number, micro), stream=100).seed
        u = torch.rand(len(self.logits), generator=torch.Generator().manual_seed(seed))
        noise = u.clamp(1e-6, 1 - 1e-6).logit()
        z = (-0.1 + 1.2 * ((noise + self.logits) / (2 / 3)).sigmoid()).clamp(0, 1)
        assert isinstance(step.model, Transformer)
        outputs = functional_call(step.model, masks.gated(step.model, z), (inputs,))
        loss = step.config.task.loss(outputs, targets)
        distance = step.distillation.loss(outputs, step.distillation.teacher(inputs).detach())
        chance = (self.logits - 2 / 3 * math.log(0.1 / 1.1)).sigmoid()
        gap = (masks._cost(chance) - step.target) / masks.full
        constraint = self.multipliers[0] * gap + self.multipliers[1] * gap.square()
        return loss, (1 - share) * loss + share * distance + constraint

    def __call__(self) -> None:
        TrainingStep.plain(self.step)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            self.logits.clamp_(math.log(0.01), math.log(100))


@pytest.mark.parametrize("accumulate", [1, 3])
def test_steps_on_fixed_tensors_are_the_formulas_to_the_last_bit(
    run: Path, accumulate: int
) -> None:
    plan, changes = plan_of(300), {"train.accumulate": str(accumulate)}
    one, other = (start(run, plan, name, changes=changes) for name in ("one", "other"))
    written = None
    for _ in range(12):
        one._step()
        other.driver.before_step()
        step, masks = other.cofi.step, other.cofi.masks
        assert masks is not None
        if written is None:
            written = WrittenOut(step, masks, plan.mask_rate)
            step.losses = written.losses  # type: ignore[method-assign]
        step.load_(other.compressor.steps)
        written()
        other.compressor.finish_step_()
        assert one.cofi.masks is not None
        assert torch.equal(one.cofi.masks.logits, written.logits)
        assert torch.equal(one.cofi.masks.multipliers, written.multipliers)
        assert torch.equal(one.state.step.loss, step.loss)
        weights = (trainer.compressor.optimizer.store.weight for trainer in (one, other))
        assert torch.equal(*weights)
    for trainer in (one, other):
        trainer.folder.close()


# What a CUDA graph cannot capture: values read by the host or made by it, shapes made of values.
ON_HOST = {f"aten::{name}" for name in ("item", "nonzero", "masked_select", "lift_fresh")}


def operators_of(action: Callable[[], object]) -> set[str]:
    """The operators that run, with those inside others and in backward passes."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        action()
    return {event.name for event in profiled.events() or ()}


@pytest.mark.parametrize("layer_distill", [0.0, 2.0])
def test_a_masked_step_reads_nothing_back(run: Path, layer_distill: float) -> None:
    """But for the optimizers of the masks, which count their steps on the host of a CPU run."""
    trainer = start(run, replace(plan_of(300), layer_distill=layer_distill), "cofi")
    trainer._step()
    step, masks = trainer.cofi.step, trainer.cofi.masks
    assert masks is not None
    addresses = [tensor.grad.data_ptr() for tensor in (masks.logits, masks.multipliers)]
    found = operators_of(lambda: TrainingStep.plain(step))
    assert "aten::sigmoid_backward" in found
    assert not found & ON_HOST
    rows = torch.ones(2, 2, requires_grad=True)
    assert "aten::item" in operators_of(lambda: rows.prod(1).sum().backward())
    masks.step_()
    after = [tensor.grad.data_ptr() for tensor in (masks.logits, masks.multipliers)]
    assert after == addresses
    trainer.folder.close()


@pytest.mark.parametrize(("accumulate", "layer_distill"), [(1, 0.0), (2, 0.0), (2, 2.0)])
def test_replayed_steps_are_those_that_run_plainly(
    run: Path, accumulate: int, layer_distill: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit, while the target falls, at the target, and after masks are made dense."""
    # As on a GPU: torch has the optimizers of CUDA graphs for no CPU.
    module = sys.modules[torch.optim.Adam.__module__]
    monkeypatch.setattr(module, "_get_capturable_supported_devices", lambda **_: ["cpu"])
    plan = replace(plan_of(300), prune=10, layer_distill=layer_distill)
    changes = {"train.accumulate": str(accumulate)}
    one, other = (start(run, plan, name, changes=changes) for name in ("one", "other"))
    replayed = ReplayedStep(other.cofi.step.plain)
    other.cofi.step._step = replayed
    for number in range(plan.steps):
        for trainer in (one, other):
            trainer.driver.before_step()
            if number == 0:
                assert trainer.cofi.masks is not None
                layers = trainer.cofi.step._layers
                optimizers = [trainer.cofi.masks._descent, trainer.cofi.masks._ascent]
                for optimizer in [*optimizers, *([layers._descent] if layers else [])]:
                    optimizer.param_groups[0]["capturable"] = True
            trainer.state.step.load_(number)
            trainer.state.step()
            trainer.compressor.finish_step_()
        masks, others = one.cofi.masks, other.cofi.masks
        assert (masks is None) == (others is None) == (number >= plan.dense_at)
        if masks is not None and others is not None:
            assert masks.state() == others.state()
            tensors = one.cofi.step.state_tensors(), other.cofi.step.state_tensors()
            assert ("layers.map" in tensors[0]) == (layer_distill > 0)
            assert all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0])
        assert torch.equal(one.state.step.loss, other.state.step.loss)
        weights = (trainer.compressor.optimizer.store.weight for trainer in (one, other))
        assert torch.equal(*weights)
    # Two structures, each with a plain step and a recorded one.
    assert replayed.replays == plan.steps - 4
    for trainer in (one, other):
        trainer.folder.close()


def test_a_graph_is_dropped_with_the_masks_that_it_has(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = start(run, replace(plan_of(300), prune=10), "cofi")
    step, dropped = trainer.cofi.step, []
    monkeypatch.setattr(step._step, "reset", lambda release=False: dropped.append(step.number))
    for _ in range(20):
        trainer._step()
        trainer.driver.advance()
    # At the start; where masks are made dense; and in the next call, for the new structure.
    assert sorted(set(dropped)) == [0, 14, 15]
    trainer.folder.close()


def test_the_teacher_is_counted_in_fma_whatever_is_priced(run: Path) -> None:
    plan = CofiPlan("parameters", 200, warmup=5, prune=25, finetune=10, distill=0.5, mask_rate=0.3)
    source = Source.of(run)
    config = cofi_settings(source, plan, {"compress.accounting": "bytes"})
    trainer = CofiTrainer(source, plan, config, run.parent / "cofi")
    trainer._step()
    own = trainer.record.training_fma - source.training_fma
    assert trainer.compressor.fma > 2 * source.summary["fma_final"]  # bytes
    trainer.driver.advance()
    assert own == pytest.approx(source.summary["fma_final"] * 4 / 3)
    trainer.folder.close()
