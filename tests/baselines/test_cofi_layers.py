"""CoFi's distillation of layers: what is matched, the distance, and what a checkpoint keeps."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from gaugelasso.baselines.cofi_layers import LayerDistillation
from gaugelasso.baselines.cofi_masks import Masks
from gaugelasso.baselines.cofi_run import CofiTrainer
from gaugelasso.baselines.cofi_step import CofiStep
from gaugelasso.compress.compressor import Compressor
from gaugelasso.compress.pricing import Product
from gaugelasso.models import Transformer, TransformerSpec
from tests.baselines.cofi_runs import plan_of, start
from tests.command import Command, assert_user_error
from tests.tiny_runs import read

SPEC = TransformerSpec.uniform(
    width=6, layers=5, heads=2, d_k=2, d_v=2, d_f=3, length=4, inputs=7, outputs=7
)


def streams(count: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(6, 8, generator=generator) for _ in range(count)]


def matched_one_by_one(distances: list[list[float]], is_open: list[bool]) -> list[int]:
    """From the teacher's last layer on: the nearest open layer before the match of the next."""
    last, found = len(is_open), []
    for row in reversed(distances):
        left = [k for k in range(last) if k < len(is_open) and is_open[k]]
        last = min(left, key=row.__getitem__) if left else min(last, len(is_open) - 1)
        found.append(last)
    return found[::-1]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("is_open", [[1, 1, 1, 1, 1], [1, 0, 1, 0, 1], [0, 0, 0, 1, 0], [0] * 5])
def test_layers_are_matched_in_order_and_open(seed: int, is_open: list[int]) -> None:
    distances = torch.rand(4, 5, generator=torch.Generator().manual_seed(seed))
    found = LayerDistillation._matches(distances, torch.tensor(is_open).bool())
    assert found.tolist() == matched_one_by_one(distances.tolist(), [bool(k) for k in is_open])


def test_four_layers_at_equal_distances_are_taught() -> None:
    assert LayerDistillation(Transformer(SPEC), 0.1)._taught == [0, 1, 2, 4]
    few = replace(SPEC, operators=SPEC.operators[:4])
    assert LayerDistillation(Transformer(few), 0.1)._taught == [0, 1]


def test_streams_are_those_after_each_layer() -> None:
    model = Transformer(SPEC)
    layers, tokens = LayerDistillation(model, 0.1), torch.arange(8).view(2, 4) % 7
    with torch.no_grad(), layers.watched(model) as seen:
        model(tokens)
    x, expected = model.embedding(tokens, 6), []
    with torch.no_grad():
        for name, operator in model.operators.items():
            x = operator(x, 2, None) if "attention" in name else operator(x, 2)
            if "mlp" in name:
                expected.append(x.clone())
    assert len(seen) == 5
    assert all(torch.equal(*pair) for pair in zip(seen, expected, strict=True))
    model(tokens)
    assert len(seen) == 5  # not watched any more


def test_the_distance_is_relative_and_of_the_mapped_stream() -> None:
    layers = LayerDistillation(Transformer(SPEC), 0.1)
    teacher, opened = streams(5, 0), torch.ones(5).bool()
    assert float(layers.distance(teacher, teacher, opened).detach()) == 0
    student = streams(5, 1)
    with torch.no_grad():
        layers.map.add_(0.3 * torch.randn(6, 6, generator=torch.Generator().manual_seed(2)))
    mapped = [layers.map.detach() @ h for h in student]
    far = [
        [float((mapped[s] - teacher[t]).square().mean()) for s in range(5)] for t in (0, 1, 2, 4)
    ]
    match = matched_one_by_one(far, [True] * 5)
    expected = [
        far[k][match[k]] / float(teacher[t].square().mean()) for k, t in enumerate((0, 1, 2, 4))
    ]
    found = layers.distance(student, teacher, opened)
    assert float(found.detach()) == pytest.approx(sum(expected), rel=1e-5)
    # The same streams ten times as large are as far.
    large = layers.distance([10 * h for h in student], [10 * h for h in teacher], opened)
    assert float(large.detach()) == pytest.approx(float(found.detach()), rel=1e-5)


def test_a_closed_layer_is_one_with_its_attention_closed() -> None:
    model = Transformer(replace(SPEC, operators=SPEC.operators[:-2] + SPEC.operators[-1:]))
    layers = LayerDistillation(model, 0.1)
    terms = [t for t in Compressor(model, 0.0).state.plan.terms if isinstance(t, Product)]
    masks = Masks(model, terms, 0.01, 0)

    def is_open(*closed: str) -> list[bool]:
        values = torch.ones(len(masks.logits))
        for part in masks.parts:
            if part.family in ("mha", "ffn") and part.owner.removeprefix("operators.") in closed:
                part.of(values).zero_()
        return layers.is_open(masks, values).tolist()

    assert is_open("attention_1", "mlp_2") == [True, False, True, True, True]
    assert is_open("mlp_4") == [True, True, True, True, False]  # which has an MLP alone


def opened(trainer: CofiTrainer, close: bool) -> CofiStep:
    """A step about to be made, with its masks; with `close` the attention of a layer is shut."""
    trainer.driver.before_step()
    step = trainer.cofi.step
    assert step.masks is not None
    if close:
        with torch.no_grad():
            for part in step.masks.parts:
                if part.family == "mha" and part.owner.endswith("_0"):
                    part.of(step.masks.logits).fill_(-50.0)
    step.load_(0)
    step._fill_(step.masks)
    return step


@pytest.mark.parametrize("close", [False, True])
def test_a_step_adds_the_distance_of_layers_while_there_are_masks(run: Path, close: bool) -> None:
    """As often as its weight says; its gradient reaches weights, masks and the map."""
    plan = replace(plan_of(300), mask_bound=0.0)
    trainers = [
        start(run, replace(plan, layer_distill=weight), name)
        for name, weight in (("one", 0.0), ("other", 3.0))
    ]
    plain, taught = (opened(trainer, close) for trainer in trainers)
    inputs, targets = plain.inputs[0], plain.targets[0]
    layers, masks, model = taught._layers, taught.masks, taught.model
    assert layers is not None
    assert masks is not None
    assert isinstance(model, Transformer)
    with torch.no_grad():
        layers.map.add_(0.2)
        model.get_parameter("operators.mlp_0.down").mul_(1.5)  # away from the teacher
        plain.model.get_parameter("operators.mlp_0.down").mul_(1.5)
    loss, total = plain.losses(inputs, targets, 0)
    again, more = taught.losses(inputs, targets, 0)
    assert torch.equal(loss, again)
    values = masks.sample(taught._noise[0])
    with layers.watched(model) as own:
        functional_call(model, masks.gated(model, values), (inputs,))
    with torch.no_grad(), layers.watched(taught.distillation.teacher) as theirs:
        taught.distillation.teacher(inputs)
    is_open = layers.is_open(masks, values)
    assert bool(is_open[0]) is not close
    expected = 3 * float(layers.distance(own, theirs, is_open).detach())
    assert float((more - total).detach()) == pytest.approx(expected, rel=1e-4)
    assert expected > 0
    (more - total).backward()
    weight = model.get_parameter("operators.mlp_0.down")
    for tensor in (masks.logits, layers.map, weight):
        assert tensor.grad is not None
        assert float(tensor.grad.norm()) > 0
    before = layers.map.detach().clone()
    taught.plain()
    assert not torch.equal(before, layers.map.detach())
    assert layers.map.grad is not None
    assert float(layers.map.grad.norm()) == 0
    taught.masks = None  # made dense
    assert not any(name.startswith("layers.") for name in taught.state_tensors())
    for trainer in trainers:
        trainer.folder.close()


def test_a_return_takes_the_map_along(run: Path) -> None:
    """Also into a checkpoint that is written before the next step."""
    trainer = start(run, replace(plan_of(300), layer_distill=3.0), "cofi")
    for _ in range(6):
        trainer._step()
    trainer.state.save()
    saved = {name: t.clone() for name, t in trainer.cofi.step.state_tensors().items()}
    for _ in range(4):
        trainer._step()
    assert not torch.equal(trainer.cofi.step.state_tensors()["layers.map"], saved["layers.map"])
    trainer.driver.fail("NaN")
    trainer.state.save()
    newest = trainer.state.saved.newest()
    assert newest is not None
    for found in (trainer.cofi.step.state_tensors(), newest.state()[1]):
        assert {name for name in found if name.startswith("layers.")} >= {"layers.map"}
        assert all(torch.equal(found[n], saved[n]) for n in saved if n.startswith("layers."))
    trainer.folder.close()


def test_a_map_without_a_finite_gradient_stays_finite() -> None:
    layers = LayerDistillation(Transformer(SPEC), 0.1)
    assert layers.map.grad is not None
    layers.map.grad.fill_(torch.nan)
    layers.step_()
    assert torch.equal(layers.map.detach(), torch.eye(6))


def test_what_is_kept_is_all_that_the_next_step_depends_on() -> None:
    one = LayerDistillation(Transformer(SPEC), 0.1)
    assert list(one.state()) == ["map"]  # before the first step

    def step(layers: LayerDistillation, seed: int) -> None:
        assert layers.map.grad is not None
        layers.map.grad.copy_(streams(1, seed)[0][:, :6])
        layers.step_()

    step(one, 0)
    other = LayerDistillation(Transformer(SPEC), 0.1)
    other.load_(copy.deepcopy(one.state()))
    for layers in (one, other):
        step(layers, 1)
    assert torch.equal(one.map, other.map)


def test_the_command_has_a_weight_of_layers(gaugelasso: Command, run: Path) -> None:
    phases = ("--warmup", "5", "--prune", "20", "--finetune", "5", "--mask-rate", "0.5")
    for name, given, weight in (("own", (), 0.0), ("two", ("--layer-distill", "2"), 2.0)):
        out = run.parent / name
        gaugelasso("cofi", run, "--fma", "500", *phases, *given, "--out", out)
        assert read(out / "summary.json")["cofi"]["layer_distill"] == weight
    for wrong in ("-1", "inf", "nan"):
        answer = gaugelasso("cofi", run, "--fma", "500", "--layer-distill", wrong)
        assert_user_error(answer, f"--layer-distill {wrong}: must be a finite number of at least 0")
