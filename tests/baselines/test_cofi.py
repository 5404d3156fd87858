"""CoFi: masks and their control, the dense cut, and runs of the command."""

import contextlib
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from torch.profiler import ProfilerActivity, profile

from gaugelasso.axes import named_tensors
from gaugelasso.baselines.cofi import CofiPlan, parameters
from gaugelasso.baselines.cofi_cost import parameter_terms, row_products
from gaugelasso.baselines.cofi_cut import make_dense_
from gaugelasso.baselines.cofi_masks import FAMILIES, Masks
from gaugelasso.baselines.cofi_run import CofiTrainer, cofi_settings, teacher_of
from gaugelasso.baselines.cofi_step import CofiDistillation, CofiStep
from gaugelasso.baselines.source import Source
from gaugelasso.compress.compressor import Compressor
from gaugelasso.compress.options import CompressorOptions
from gaugelasso.compress.result import TargetMissed
from gaugelasso.errors import UserError
from gaugelasso.models import Transformer, TransformerSpec
from gaugelasso.runs.checkpoint import load_model
from gaugelasso.runs.folder import Existing
from gaugelasso.training.step import TrainingStep
from tests.baselines.replayed import ReplayedStep
from tests.command import Command, assert_user_error
from tests.export.sources import tiny, write_run
from tests.tiny_runs import assert_same_run, finished, keep_images, read, rows

PLAIN = {"compress__solver": "fixed", "target__loss": 1e30}


def model_of(norm: str = "slow", kv_heads: int = 2, **also: bool) -> Transformer:
    spec = TransformerSpec.uniform(
        width=8, layers=2, heads=4, kv_heads=kv_heads, d_k=4, d_v=4, d_f=6, length=6, inputs=8,
        outputs=8, norm=norm,
    )  # fmt: skip
    model = Transformer(replace(spec, **also), seed=1).double()
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if name.endswith("_bias"):
            torch.nn.init.normal_(parameter, generator=generator)
    return model


def masks_of(
    model: Transformer, objective: str = "fma", rate: float = 0.05
) -> tuple[Compressor, Masks]:
    compressor = Compressor(model, 0.0, CompressorOptions(solver="fixed"))
    state = compressor.state
    terms: Any = state.plan.terms
    if objective == "parameters":
        terms = parameter_terms(state.table, named_tensors(model))
    return compressor, Masks(model, terms, rate, seed=0)


def set_(masks: Masks, closed: dict[str, list[int]], owner: str = "") -> None:
    """Open all masks but these, family -> positions in its parts of this owner."""
    with torch.no_grad():
        masks.logits.fill_(20.0)
        for part in masks.parts:
            if part.family in closed and owner in part.owner:
                part.of(masks.logits)[closed[part.family]] = -20.0


INPUTS = torch.arange(12).view(2, 6) % 8


@pytest.mark.parametrize(
    ("also", "named"),
    [
        ({"write_bias": True}, "write_bias = true"),
        ({"mlp": "gelu"}, "mlp = 'gelu'"),
        ({"post_norm": True, "causal": False}, "post_norm = true"),
    ],
)
def test_models_that_the_masks_do_not_fit_are_refused(
    also: dict[str, Any], named: str, tmp_path: Path
) -> None:
    run = write_run(tmp_path / "run", tiny(1, also))
    with pytest.raises(UserError, match=named):
        teacher_of(run)


# --- masks ----------------------------------------------------------------------------------


def test_a_mask_is_open_as_often_as_its_probability_says() -> None:
    _, masks = masks_of(model_of())
    with torch.no_grad():
        masks.logits.copy_(torch.linspace(-3, 3, len(masks.logits)))
    drawn = torch.stack([masks.sample(masks.noise(seed)) for seed in range(1000)])
    assert torch.equal(drawn[0], masks.sample(masks.noise(0)))
    assert drawn.min() == 0
    assert drawn.max() == 1
    torch.testing.assert_close(
        (drawn > 0).float().mean(0), masks.open_probability().detach(), atol=0.06, rtol=0
    )
    zeros, chance = masks.deterministic() == 0, masks.open_probability().detach()
    for part in masks.parts:
        expected = part.size - float(part.of(chance).sum())
        assert int(part.of(zeros).sum()) == round(expected)


def test_open_masks_change_nothing_and_cost_all() -> None:
    model = model_of()
    for objective, full in (("fma", None), ("parameters", parameters(model))):
        compressor, masks = masks_of(model, objective)
        set_(masks, {})
        assert masks.full == pytest.approx(full or compressor.fma)
        assert float(masks.expected().detach()) == pytest.approx(masks.full, rel=1e-4)
    gated = masks.gated(model, torch.ones(len(masks.logits)))
    assert torch.equal(functional_call(model, gated, (INPUTS,)), model(INPUTS))
    every = sum(p.numel() for p in model.parameters())
    tables = model.embedding.table.numel() + (
        0 if model.embedding.positions is None else model.embedding.positions.numel()
    )
    assert parameters(model) == every - tables


@pytest.mark.parametrize(
    ("norm", "also", "kv_heads"),
    [
        ("slow", None, 2),
        ("slow", None, 4),
        ("tied", None, 2),
        ("slow", "attention_bias", 2),
        ("slow", "qk_norm", 4),
        ("slow", "tied_head", 2),
    ],
)
@pytest.mark.parametrize(
    ("closed", "owner"),
    [
        ({"head": [0]}, "attention_1"),
        ({"mha": [0]}, "attention_0"),
        ({"ffn": [0]}, "mlp_1"),
        ({"intermediate": [1, 4]}, "mlp"),
        ({"hidden": [2, 3]}, ""),
        ({"hidden": [0], "head": [1], "intermediate": [0, 5]}, ""),
    ],
)
def test_the_dense_model_is_the_masked_one(
    norm: str, also: str | None, kv_heads: int, closed: dict[str, list[int]], owner: str
) -> None:
    model = model_of(norm, kv_heads, **({also: True} if also else {}))
    compressor, masks = masks_of(model)
    set_(masks, closed, owner)
    before = compressor.fma
    with masks.applied(model):
        wanted = model.eval()(INPUTS)
    expected = float(masks.expected().detach())
    make_dense_(compressor.state, masks)
    torch.testing.assert_close(model.eval()(INPUTS), wanted)
    assert compressor.fma < before
    # What the cascade and the scales of a removed block save is not in the expectation.
    assert compressor.fma == pytest.approx(expected, rel=0.05)
    assert compressor.fma <= expected * 1.001
    # The optimizer and the structure follow.
    assert Transformer(model.spec()).spec() == model.spec()
    model.train()
    compressor.step(lambda: model(INPUTS).square().mean())


def test_the_control_brings_the_cost_to_its_target() -> None:
    _, masks = masks_of(model_of(), rate=0.1)
    target = 0.5 * masks.full
    for _ in range(250):
        masks.lagrangian(target).backward()
        masks.step_()
    assert float(masks.expected().detach()) == pytest.approx(target, rel=0.1)
    assert float(masks.multipliers[1].detach()) > 0


def test_multipliers_rise_by_their_rate_while_the_cost_is_above() -> None:
    _, masks = masks_of(model_of())
    for _ in range(10):
        masks.lagrangian(0.01 * masks.full).backward()
        masks.step_()
    assert masks.multipliers.tolist() == pytest.approx([0.5, 0.5], rel=1e-3)


def test_masks_go_on_from_their_state() -> None:
    (_, one), (_, other) = masks_of(model_of()), masks_of(model_of())
    for number in range(6):
        if number == 3:
            other.load_(one.state())
        for masks in (one, other)[: 1 + (number >= 3)]:
            masks.lagrangian(0.3 * masks.full).backward()
            masks.step_()
    assert torch.equal(one.logits, other.logits)
    assert torch.equal(one.multipliers, other.multipliers)
    with pytest.raises(ValueError, match="numbers of masks in place of"):
        other.load_([0.0])


def test_products_of_rows_are_those_of_prod_and_survive_zeros() -> None:
    rows = torch.rand(50, 4, generator=torch.Generator().manual_seed(1)) + 0.1
    given = torch.linspace(-1, 1, 50)
    found = []
    for product in (row_products, lambda values: values.prod(1)):
        values = rows.clone().requires_grad_()
        result = product(values)
        result.backward(given)
        found.append((result.detach(), values.grad))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    closed = torch.tensor([[0.0, 2.0, 3.0]], requires_grad=True)
    row_products(closed).sum().backward()
    assert torch.equal(closed.grad, torch.zeros(1, 3))


def test_logits_of_any_size_have_finite_gradients() -> None:
    _, masks = masks_of(model_of())
    with torch.no_grad():
        masks.logits.fill_(-200)  # whose sigmoid is zero
        masks.multipliers.fill_(1.0)
    assert float(masks.expected().detach()) == 0
    masks.lagrangian(0.5 * masks.full).backward()
    assert not masks.logits.grad.any()


def test_distillation_is_the_divergence_at_temperature_2_or_the_squared_error() -> None:
    model = model_of()
    wanted = model(INPUTS).detach()
    outputs = wanted + torch.randn(wanted.shape, generator=torch.Generator().manual_seed(3))
    p, q = (values.float().div(2).softmax(-1) for values in (wanted, outputs))
    divergence = 4 * (p * (p / q).log()).sum(-1).mean()
    for logits, expected in ((True, divergence), (False, (outputs - wanted).square().mean())):
        taught = CofiDistillation(model, 0.5, logits)
        assert float(taught.loss(wanted, wanted)) == pytest.approx(0, abs=1e-6)
        assert float(taught.loss(outputs, wanted)) == pytest.approx(float(expected), rel=1e-5)


def test_no_masks_cost_less_than_one_site_without_blocks() -> None:
    for objective in ("fma", "parameters"):
        model = model_of()
        compressor, masks = masks_of(model, objective)
        every: dict[str, Any] = {"mha": [0], "ffn": [0], "hidden": list(range(1, 8))}
        set_(masks, every)
        assert float(masks.expected().detach()) < 2 * masks.least
        make_dense_(compressor.state, masks)
        assert (len(model.operators), len(model.sites)) == (0, 1)
        reached = compressor.fma if objective == "fma" else parameters(model)
        assert reached == pytest.approx(masks.least)


def test_deterministic_masks_are_on_the_model_within_their_context_only() -> None:
    model = model_of()
    _, masks = masks_of(model)
    set_(masks, {"intermediate": [1, 4]}, "mlp_0")
    before = {name: tensor.clone() for name, tensor in named_tensors(model).items()}
    with masks.applied(model):
        assert not model.operators["mlp_0"].down[[1, 4]].any()
    after = named_tensors(model)
    assert all(torch.equal(after[name], before[name]) for name in before)


# --- runs -----------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A full model, trained without pressure."""
    return finished(tmp_path, **PLAIN)


def plan_of(target: float, rate: float = 0.1) -> CofiPlan:
    return CofiPlan("fma", target, warmup=5, prune=80, finetune=10, distill=0.5, mask_rate=rate)


def start(
    run: Path,
    plan: CofiPlan,
    name: str,
    existing: Existing = "refuse",
    changes: Mapping[str, str] | None = None,
) -> CofiTrainer:
    source = Source.of(run)
    config = cofi_settings(source, plan, changes or {})
    return CofiTrainer(source, plan, config, run.parent / name, existing)


def test_a_run_ends_dense_at_its_target(run: Path) -> None:
    full = read(run / "summary.json")
    target = 0.5 * full["fma_final"]
    trainer = start(run, plan_of(target), "cofi")
    summary = trainer.run()
    folder, found = trainer.folder.path, summary["cofi"]
    assert summary["method"] == "cofi"
    assert 0.6 * target < summary["fma_final"] == found["reached"] <= 1.02 * target
    (event,) = rows(folder, "events.jsonl")
    assert (event["step"], event["fma"]) == (85, summary["fma_final"])
    # Steps of the student, and a third of a step of the teacher for its forward pass.
    teacher = summary["steps"] * full["fma_final"] / 3
    own = 85 * full["fma_final"] + 10 * summary["fma_final"] + teacher
    assert summary["training_work"]["own"] == pytest.approx(own)
    assert summary["training_work"]["before"] == full["training_fma"]
    pruned = [row for row in rows(folder, "metrics.jsonl") if row["step"] <= 85]
    assert [row["phase"] for row in pruned][:2] == ["warmup", "compression"]
    assert all(f"mask_{family}" in row for row in pruned for family in FAMILIES)
    assert pruned[-1]["lambda_1"] == pytest.approx(found["lambda_1"])
    assert found["masks"]["intermediate"] < 1
    assert found["lambda_1_per_1000_steps"] is not None
    assert "lambda_1" not in rows(folder, "metrics.jsonl")[-1]
    assert load_model(folder).structure() == summary["structure"]


def test_a_target_that_the_control_does_not_reach_is_said_with_the_nearest(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At the end, and before that as soon as the masks are made dense."""
    target = 0.5 * read(run / "summary.json")["fma_final"]
    trainer = start(run, replace(plan_of(target, rate=1e-4), prune=10), "cofi")
    seen: list[tuple[int, str]] = []
    trainer.log._on_progress = lambda progress: seen.append((progress.row["step"], caplog.text))
    with pytest.raises(
        TargetMissed, match=r"--fma 312 was not reached: the nearest is \d+; lambda"
    ) as missed:
        trainer.run()
    (said,) = [record.message for record in caplog.records]
    nearest = read(trainer.folder.path / "summary.json")["cofi"]["reached"]
    assert f"--fma 312 is missed: the masks made dense leave {nearest:,.0f}, and the" in said
    advice = "raise --prune (here 10) or --mask-rate (here 0.0001)"
    assert advice in said
    assert advice in str(missed.value)
    dense = trainer.plan.dense_at
    assert all(("is missed" in text) is (step > dense) for step, text in seen)
    assert {step > dense for step, _ in seen} == {True, False}
    summary = read(trainer.folder.path / "summary.json")
    assert summary["held"] is False
    assert summary["cofi"]["reached"] == summary["fma_final"] > 1.02 * target


@pytest.mark.parametrize("failing", [1, 3])
def test_steps_without_a_finite_loss_do_not_spoil_the_masks(
    run: Path, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is left out. Three are a failure: back to the newest checkpoint, masks included."""
    target, losses = 0.5 * read(run / "summary.json")["fma_final"], CofiStep.losses
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


def test_a_masked_step_reads_nothing_back(run: Path) -> None:
    """But for the optimizers of the masks, which count their steps on the host of a CPU run."""
    trainer = start(run, plan_of(300), "cofi")
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


@pytest.mark.parametrize("accumulate", [1, 2])
def test_replayed_steps_are_those_that_run_plainly(
    run: Path, accumulate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit, while the target falls, at the target, and after masks are made dense."""
    # As on a GPU: torch has the optimizers of CUDA graphs for no CPU.
    module = sys.modules[torch.optim.Adam.__module__]
    monkeypatch.setattr(module, "_get_capturable_supported_devices", lambda **_: ["cpu"])
    plan, changes = replace(plan_of(300), prune=10), {"train.accumulate": str(accumulate)}
    one, other = (start(run, plan, name, changes=changes) for name in ("one", "other"))
    replayed = ReplayedStep(other.cofi.step.plain)
    other.cofi.step._step = replayed
    for number in range(plan.steps):
        for trainer in (one, other):
            trainer.driver.before_step()
            if number == 0:
                assert trainer.cofi.masks is not None
                for optimizer in (trainer.cofi.masks._descent, trainer.cofi.masks._ascent):
                    optimizer.param_groups[0]["capturable"] = True
            trainer.state.step.load_(number)
            trainer.state.step()
            trainer.compressor.finish_step_()
        masks, others = one.cofi.masks, other.cofi.masks
        assert (masks is None) == (others is None) == (number >= plan.dense_at)
        if masks is not None and others is not None:
            assert masks.state() == others.state()
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


def finish(
    run: Path,
    plan: CofiPlan,
    name: str,
    existing: Existing = "refuse",
    kept: tuple[int, ...] = (),
    changes: Mapping[str, str] | None = None,
) -> None:
    trainer = start(run, plan, name, existing, changes)
    if kept:
        keep_images(trainer, *kept)
    with contextlib.suppress(TargetMissed):
        trainer.run()


def test_a_killed_run_resumes_to_the_same_end(run: Path) -> None:
    """Killed with masks, and after they are made dense."""
    plan = replace(plan_of(0.5 * read(run / "summary.json")["fma_final"], 0.5), prune=25)
    steps = 23, 36
    finish(run, plan, "whole", kept=steps)
    for step in steps:
        finish(run, plan, str(step), "resume")
        assert_same_run(run.parent / "whole", run.parent / str(step))


def test_the_command_holds_the_number_of_parameters(gaugelasso: Command, run: Path) -> None:
    model = load_model(run)
    assert isinstance(model, Transformer)
    target = 0.8 * parameters(model)
    phases = ("--warmup", "5", "--prune", "60", "--finetune", "5", "--mask-rate", "0.3")
    code, _, err = gaugelasso("cofi", run, "--parameters", str(target), *phases)
    assert (code, err) == (0, "")
    summary = read(run / "cofi" / "summary.json")
    assert summary["held"]
    assert summary["cofi"]["objective"] == "parameters"
    again = load_model(run / "cofi")
    assert isinstance(again, Transformer)
    assert parameters(again) == summary["cofi"]["reached"] <= 1.02 * target
    assert gaugelasso("info", run / "cofi")[0] == 0
    assert gaugelasso("eval", run / "cofi", "--batches", "1")[0] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "--fma and --parameters: give one of them; none is given"),
        (("--fma", "1e9"), "--fma 1e+09: must be above 0 and below the 624 of the model"),
        (("--parameters", "0"), "--parameters 0: must be above 0 and below the"),
        (("--fma", "3"), "--fma 3 cannot be reached by masks of"),
        (("--fma", "3"), "of one residual site without blocks"),
        (("--fma", "300", "--distill", "1.5"), "--distill 1.5: must be a number from 0 to 1"),
        (("--fma", "300", "--set", "compress.anchor=1"), "makes no use of compress.anchor"),
        (("--fma", "300", "--set", "train.probe=true"), "makes no use of train.probe"),
        (("--fma", "300", "--set", "compress.accounting=bytes"), "counts no work"),
    ],
)
def test_what_cannot_be_done_is_refused(
    gaugelasso: Command, run: Path, options: tuple[str, ...], message: str
) -> None:
    assert_user_error(gaugelasso("cofi", run, *options), message)
    assert not (run / "cofi").exists()
