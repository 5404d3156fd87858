"""Torch-Pruning: plain modules, what the package removes, its regularisation, and runs."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gaugelasso.baselines.source import Source
from gaugelasso.baselines.torch_pruning_choice import (
    GroupNormRegularizer,
    Mode,
    PackageChoice,
    PrunerOptions,
    RankingScope,
)
from gaugelasso.baselines.torch_pruning_modules import plain_of
from gaugelasso.baselines.torch_pruning_run import (
    RegularizedStep,
    TorchPruningPlan,
    TorchPruningTrainer,
    torch_pruning_settings,
)
from gaugelasso.compress.compressor import Compressor
from gaugelasso.compress.drop import cascade
from gaugelasso.compress.options import CompressorOptions
from gaugelasso.errors import UserError
from gaugelasso.models import Transformer, TransformerSpec
from gaugelasso.report import write_report
from gaugelasso.report.data import load_run
from gaugelasso.runs.checkpoint import load_model
from gaugelasso.runs.folder import Existing
from tests.baselines.replayed import ReplayedStep
from tests.command import Command, assert_user_error
from tests.tiny_runs import assert_same_run, finished, keep_images, read, rows, stop_at

PLAIN = {"compress__solver": "fixed", "target__loss": 1e30}
# Heads that share keys, with RoPE; one key for each head, without; patches and a tied normaliser;
# a tied head.
SHAPES: list[dict[str, Any]] = [
    {"kv_heads": 2},
    {"kv_heads": 4, "rope": False, "positions": True},
    {
        "input_kind": "masked_patches",
        "positions": True,
        "causal": False,
        "norm": "tied",
        "eps": 0.1,
    },
    {"kv_heads": 2, "tied_head": True},
]


def model_of(shape: dict[str, Any]) -> Transformer:
    """A small model with weights, gains, scales and normalisers that are all different."""
    shape = dict(shape)
    also = {"tied_head": shape.pop("tied_head", False)}
    spec = TransformerSpec.uniform(
        width=8, layers=2, heads=4, d_k=4, d_v=3, d_f=6, length=6, inputs=8, outputs=8, **shape
    )
    model = Transformer(replace(spec, **also), seed=1).double().eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_floating_point() and tensor.ndim == 1 and len(tensor) == 8:
                tensor.mul_(0.5 + torch.rand(8, generator=generator, dtype=torch.float64))
    return model


def inputs_of(model: Transformer) -> Tensor:
    if model.embedding.tokens:
        return torch.arange(12).view(2, 6) % 8
    return torch.linspace(-1, 1, 2 * 6 * 9, dtype=torch.float64).view(2, 6, 9)


def compressor_of(model: Transformer) -> Compressor:
    return Compressor(model, 0.0, CompressorOptions(solver="fixed"))


# --- plain modules --------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_plain_modules_have_the_outputs_of_the_model(shape: dict[str, Any]) -> None:
    model = model_of(shape)
    inputs = inputs_of(model)
    torch.testing.assert_close(plain_of(model)(inputs), model(inputs), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("attention_bias", True, "attention_bias = true"),
        ("write_bias", True, "write_bias = true"),
        ("head_bias", True, "head_bias = true"),
        ("tied_mean", True, "tied_mean = true"),
        ("mlp", "gelu", "mlp = 'gelu'"),
        ("qk_norm", True, "qk_norm = true"),
        ("window", 2, "a sliding window"),
        ("post_norm", True, "post_norm = true"),
    ],
)
def test_what_plain_modules_lack_is_refused(key: str, value: Any, named: str) -> None:
    spec = model_of(SHAPES[0]).spec()
    if key == "window":
        key, value = "operators", (replace(spec.operators[0], window=2), *spec.operators[1:])
    if key == "tied_mean":
        spec = replace(spec, outputs=spec.inputs, tied_head=True)
    causal = spec.causal and key != "post_norm"
    spec = replace(spec, **{"causal": causal, key: value})
    with pytest.raises(UserError, match=named):
        plain_of(Transformer(spec))


def test_also_those_of_a_model_whose_operators_read_and_write_some_sites() -> None:
    model = model_of({})
    state = compressor_of(model).state
    keeps = {name: torch.ones(size, dtype=torch.bool) for name, size in state.widths().items()}
    keeps["D"][3] = False
    keeps["operators.attention_0.d_ai"][[1, 5]] = False
    keeps["operators.mlp_1.d_mo"][[0, 2]] = False
    keeps["classifier.d_c"][7] = False
    decision = cascade(state.table, state.readable(), keeps)
    assert decision is not None
    state.cut_(decision, "in a test")
    assert model.operators["attention_0"].query.shape[0] < len(model.sites) == 7
    inputs = inputs_of(model)
    torch.testing.assert_close(plain_of(model)(inputs), model(inputs), rtol=1e-12, atol=1e-12)


# --- what the package removes ---------------------------------------------------------------


# Every shape in one ranking, and every ranking of one shape: neither knows of the other.
@pytest.mark.parametrize(
    ("shape", "mode", "ranking"),
    [(shape, "magnitude", "global") for shape in SHAPES]
    + [(SHAPES[0], "group-norm", "local"), (SHAPES[0], "magnitude", "isomorphic")],
)
def test_our_cut_is_the_model_that_the_package_has_pruned(
    shape: dict[str, Any], mode: Mode, ranking: RankingScope
) -> None:
    model = model_of(shape)
    state = compressor_of(model).state
    full, target = state.fma, 0.4 * state.fma
    choice = PackageChoice(state, PrunerOptions(mode, ranking, reg=1e-4))
    decision = choice.to_work(target)
    work, inputs = state.work_after(decision), inputs_of(model)
    assert 0.7 * target < work <= target
    kinds = {name.rpartition(".")[2] for name in decision.dropped()}
    assert {"D", "d_k", "d_v", "d_f"} <= kinds
    state.cut_(decision, "in a test")
    assert state.fma == work < full
    torch.testing.assert_close(choice.plain(inputs), model(inputs), rtol=1e-12, atol=1e-12)
    assert Transformer(model.spec()).spec() == model.spec()


def test_the_weakest_filters_go_first() -> None:
    model = model_of({})
    mlp = model.operators["mlp_0"]
    with torch.no_grad():
        for leaf in (mlp.up.T, mlp.gate.T, mlp.down):
            leaf[[1, 4]] *= 1e-3
    state = compressor_of(model).state
    decision = PackageChoice(state, PrunerOptions("magnitude", "global", 0.0)).to_work(
        state.fma - 1
    )
    gone = (~decision.keeps["operators.mlp_0.d_f"]).nonzero().view(-1).tolist()
    assert gone
    assert set(gone) <= {1, 4}
    assert decision.dropped() == {"operators.mlp_0.d_f": len(gone)}


def test_a_work_that_it_cannot_reach_leaves_one_index_of_each_axis() -> None:
    model = model_of({})
    state = compressor_of(model).state
    state.cut_(PackageChoice(state, PrunerOptions("magnitude", "global", 0.0)).to_work(1), "here")
    assert set(state.widths().values()) == {1}
    assert len(model.operators) == 4


# --- regularisation -------------------------------------------------------------------------


def gradients_of(model: Transformer) -> dict[str, Tensor]:
    options = PrunerOptions("group-norm", "global", reg=0.5)
    return GroupNormRegularizer(model, options).gradients(model)


def test_regularisation_is_stronger_for_weaker_channels_of_both_axes_of_a_map() -> None:
    """gradient = reg (a_site + b_filter) weight, where a and b are from 1 to 16."""
    model = Transformer(model_of({}).spec(), seed=3).double()  # gains and scales are one
    found = gradients_of(model)
    mlp = model.operators["mlp_1"]
    ratio = (found["operators.mlp_1.up"] / mlp.up.detach()) / 0.5
    by_filter = ratio - ratio[:, :1]
    torch.testing.assert_close(by_filter, by_filter[:1].expand_as(ratio))
    assert float(by_filter[0].max() - by_filter[0].min()) == pytest.approx(15)
    sites = ratio[:, 0] - by_filter[0, 0] - ratio.min() + 2
    assert float(sites.max() - sites.min()) == pytest.approx(15)
    assert float(ratio.min()) >= 2
    strength = mlp.up.square().sum(0) + mlp.gate.square().sum(0) + mlp.down.square().sum(1)
    assert int(by_filter[0].argmax()) == int(strength.argmin())
    assert "embedding.table" not in found


def test_gains_and_scales_get_their_part_of_it() -> None:
    """A map is gain x matrix: both have the same sum of weight times gradient."""
    model = model_of({}).train()
    products = {
        name: model.get_parameter(name) * gradient for name, gradient in gradients_of(model).items()
    }
    owner = "operators.mlp_0"
    matrices = (products[f"{owner}.up"] + products[f"{owner}.gate"]).sum(1)
    torch.testing.assert_close(products[f"{owner}.read.gain"], matrices)
    torch.testing.assert_close(products[f"{owner}.write.scale"], products[f"{owner}.down"].sum(0))
    assert matrices.detach().abs().min() > 0


# --- runs -----------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A full model, trained without pressure."""
    return finished(tmp_path, **PLAIN)


def plan_of(run: Path, mode: Mode = "magnitude", reg: float = 1e-2) -> TorchPruningPlan:
    return TorchPruningPlan(
        loss=None, fma=0.4 * read(run / "summary.json")["fma_final"], rounds=2, channels=1,
        corrective=4, finetune=12, sparse=0 if mode == "magnitude" else 14,
        options=PrunerOptions(mode, "global", reg),
    )  # fmt: skip


def start(
    run: Path,
    plan: TorchPruningPlan,
    name: str,
    existing: Existing = "refuse",
    changes: Mapping[str, str] | None = None,
) -> TorchPruningTrainer:
    source = Source.of(run)
    config = torch_pruning_settings(source, plan, changes or {})
    return TorchPruningTrainer(source, plan, config, run.parent / name, existing)


def test_a_run_by_group_norm_is_regularised_pruned_and_tuned(run: Path) -> None:
    full, plan = read(run / "summary.json"), plan_of(run, "group-norm")
    trainer = start(run, plan, "pruned")
    summary = trainer.run()
    folder = trainer.folder.path
    assert (summary["method"], summary["held"]) == ("torch-pruning-group-norm", True)
    assert 0.7 * plan.fma < summary["fma_final"] <= plan.fma
    assert (summary["steps"], summary["frozen_step"]) == (14 + 2 * 4 + 12, 22)
    events = rows(folder, "events.jsonl")
    assert [event["step"] for event in events] == [14, 18]
    assert events[0]["fma"] <= (full["fma_final"] + plan.fma) / 2
    # Without a balance the loss before the cut is that of the batch.
    assert all(event["loss_balanced"] == event["loss_before"] for event in events)
    rates = {row["step"]: row["lr"] for row in rows(folder, "metrics.jsonl")}
    lr, lr_min = trainer.config.compress.lr, trainer.train.lr_min
    assert (rates[10], rates[20]) == (lr, lr_min)
    assert lr_min < rates[25] < lr
    assert summary["training_fma"] > full["training_fma"] == summary["source"]["training_fma"]
    found = summary["torch_pruning"]
    assert (found["mode"], found["sparse"], found["rounds_made"]) == ("group-norm", 14, 2)
    assert load_model(folder).structure() == summary["structure"]


def test_the_steps_before_the_rounds_are_regularised(run: Path) -> None:
    norms = []
    for reg in (0.0, 10.0):
        trainer = start(run, plan_of(run, "group-norm", reg), f"reg{reg:g}")
        stop_at(trainer, 14)
        norms.append(float(trainer.compressor.state.plan.store.weight.norm()))
    assert norms[1] < norms[0]


SUMS = [
    {},
    {"train.accumulate": "3"},
    {"train.accumulate": "2", "train.canonical": "true"},
]


@pytest.mark.parametrize("sums", SUMS, ids=str)
def test_a_step_adds_the_regularisation_of_its_weights_once(
    run: Path, sums: dict[str, str]
) -> None:
    trainer = start(run, plan_of(run, "group-norm", reg=0.5), "pruned", changes=sums)
    trainer.driver.before_step()
    step, store = trainer.state.step, trainer.compressor.state.plan.store
    assert isinstance(step, RegularizedStep)
    assert step.regularizer is not None
    assert isinstance(step.model, Transformer)
    step.load_(0)
    weight, added = store.weight.clone(), step.regularizer.gradients(step.model)
    state = {name: t.clone() for name, t in trainer.compressor.state_tensors().items()}
    step()
    both = {name: part.clone() for name, part in store.views(store.grad).items()}
    step.regularizer = None
    store.weight.copy_(weight)
    for name, tensor in trainer.compressor.state_tensors().items():
        tensor.copy_(state[name])
    step()
    loss = store.views(store.grad)
    assert len(added) > 5
    for name, gradient in both.items():
        expected = loss[name] + added.get(name, 0)
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-7)
    trainer.folder.close()


@pytest.mark.parametrize("sums", SUMS, ids=str)
def test_replayed_steps_are_those_that_run_plainly(run: Path, sums: dict[str, str]) -> None:
    """To the last bit, through the regularised steps, the rounds and the fine-tuning."""
    plan = plan_of(run, "group-norm", reg=0.5)
    one, other = (start(run, plan, name, changes=sums) for name in ("one", "other"))
    replayed = ReplayedStep(other.state.step.plain)
    other.state.step._step = replayed
    for trainer in (one, other):
        trainer.run()
    assert_same_run(one.folder.path, other.folder.path)
    # With regularisation, and for each structure: a plain step and a recorded one.
    assert replayed.replays == plan.steps - 2 * 3


@pytest.mark.parametrize(("mode", "steps"), [("magnitude", (6,)), ("group-norm", (11, 25))])
def test_a_killed_run_resumes_to_the_same_end(
    run: Path, mode: Mode, steps: tuple[int, ...]
) -> None:
    """Killed within regularised steps, within a round and within the fine-tuning."""
    plan = plan_of(run, mode)
    trainer = start(run, plan, "whole")
    keep_images(trainer, *steps)
    trainer.run()
    for step in steps:
        start(run, plan, str(step), "resume").run()
        assert_same_run(run.parent / "whole", run.parent / str(step))


# --- the command ----------------------------------------------------------------------------


@pytest.mark.usefixtures("undrawn")
def test_the_command_writes_a_run_that_reports_know(gaugelasso: Command, run: Path) -> None:
    fma = 0.5 * read(run / "summary.json")["fma_final"]
    options = ("--fma", str(fma), "--rounds", "2", "--corrective", "2", "--finetune", "20")
    code, output, err = gaugelasso("torch-pruning", run, *options)
    assert (code, err) == (0, "")
    out = run / "torch-pruning"
    assert f"run folder: {out}" in output.replace("\n", "")
    summary = load_run(out).summary
    assert summary is not None
    assert summary["method"] == "torch-pruning-magnitude"
    assert summary["fma_final"] <= fma
    assert write_report([out]).page.exists()
    assert gaugelasso("info", out)[0] == 0
    assert gaugelasso("eval", out, "--batches", "1")[0] == 0
    other = (*options[:2], "--rounds", "3", *options[4:], "--resume")
    assert_user_error(gaugelasso("torch-pruning", run, *other), "--resume: rounds = 3, but the run")
    assert gaugelasso("torch-pruning", run, *options, "--resume")[0] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--fma", "nan"), "--fma nan: must be a finite number above 0"),
        (("--fma", "1e9"), "has 624 FMA per token already"),
        (("--fma", "2"), "--fma 2 cannot be reached by pruning"),
        (("--fma", "2"), "the nearest is 51 FMA per token"),
        (
            ("--fma", "300", "--mode", "group-norm", "--reg", "-1"),
            "--reg -1: must be a finite number of at least 0",
        ),
        (("--fma", "300", "--sparse", "9"), "--sparse 9: --mode magnitude trains nothing before"),
        (("--fma", "300", "--reg", "1e-3"), "--reg 0.001: --mode magnitude trains nothing before"),
        (("--fma", "300", "--set", "compress.anchor=1"), "no use of compress.anchor"),
        (("--fma", "300", "--set", "train.steps=3"), "torch-pruning takes train.steps from its"),
    ],
)
def test_what_cannot_be_pruned_is_refused(
    gaugelasso: Command, run: Path, options: tuple[str, ...], message: str
) -> None:
    assert_user_error(gaugelasso("torch-pruning", run, *options), message)
    assert not (run / "torch-pruning").exists()


def test_a_missing_package_is_named_with_its_extra(
    gaugelasso: Command, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch_pruning", None)
    answer = gaugelasso("torch-pruning", run, "--fma", "300")
    assert_user_error(answer, "pip install 'gaugelasso[torch-pruning]'")
    assert not (run / "torch-pruning").exists()
