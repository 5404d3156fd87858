"""Measures the time of a training step by parts.

Gives medians and quartiles over repetitions on random batches of a config's task. On a GPU every
part is timed as a CUDA graph, as in training. The trained weights are discarded.
"""

import dataclasses
import resource
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from gaugelasso.axes import Compressible, named_tensors
from gaugelasso.bench.stopwatch import in_turns, matrix_rate, quartiles
from gaugelasso.compress import pricing
from gaugelasso.config import Config
from gaugelasso.errors import UserError
from gaugelasso.kernels import reference_kernels
from gaugelasso.kernels.cuda_graph import GraphedStep
from gaugelasso.models import Transformer, TransformerSpec, round_up
from gaugelasso.models.own import OwnModel
from gaugelasso.runs.structures import Structure
from gaugelasso.tasks.protocol import positions
from gaugelasso.training.evaluation import configure_cpu_
from gaugelasso.training.step import TrainingStep

Row = dict[str, Any]
Build = Callable[[], Compressible]

# Parts that cannot be timed alone: each is the difference of two measured times.
_DIFFERENCES = {
    "backward_ms": ("gradients_ms", "forward_ms"),
    "optimizer_ms": ("baseline_ms", "gradients_ms"),
    "machinery_ms": ("ms", "baseline_ms"),
}


def work_per_token(model: Compressible) -> float:
    """Return the multiply-adds per token, whatever accounting the config uses."""
    return pricing.total_fma(model.axis_table(), pricing.ACCOUNTINGS["fma"], named_tensors(model))


def shapes_of(config: Config, structure: Structure | None) -> TransformerSpec | Build:
    """Return what builds the model of a config, or that of a structure in its place."""
    seed = config.train.seed
    if structure:
        return partial(structure.build, seed) if structure.model_class else structure.spec()
    if isinstance(config.model, OwnModel):
        return partial(config.model.build, config.task, seed)
    return config.model.spec(config.task)


def _builder(config: Config, shapes: TransformerSpec | Build, multiple: int) -> Build:
    if isinstance(shapes, TransformerSpec):
        return partial(Transformer, round_up(shapes, multiple), config.train.seed)
    if multiple > 1:
        raise UserError("--multiple rounds up the built-in transformer only; remove it")
    return shapes


def bench_step(
    config: Config, shapes: TransformerSpec | Build, device: str, repeats: int, multiple: int = 1
) -> Row:
    """Return the times of the parts of one training step in ms, and its throughput.

    `shapes` is the structure of a transformer, or a function that builds another model. Every
    width is first rounded up to a multiple of `multiple`, and events keep that. If it is above
    1, the full step is also timed at the structure's own widths.
    """
    build, build_exact = _builder(config, shapes, multiple), _builder(config, shapes, 1)
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
    configure_cpu_(config, device)
    rounded = config
    if multiple > 1:
        compress = dataclasses.replace(config.compress, multiple=multiple)
        rounded = dataclasses.replace(config, compress=compress)
    step = _step(rounded, build, device)
    graph = device.startswith("cuda") and config.train.graph
    compressor, alone = step.compressor, GraphedStep(step.plain, graph)
    for _ in range(2 if graph else 1):  # eager first, then captured as a graph
        alone()
    del alone  # frees the memory of the captured graph
    peak = _peak_gib(device)
    exact = _step(config, build_exact, device) if multiple > 1 else None
    times = _part_times(step, exact, graph, repeats)
    if graph:
        times["eager_ms"] = in_turns({"": step.plain}, device, repeats // 5)[""]
    # Before the events, which cut the model.
    work, parameters = work_per_token(step.model), compressor.parameters
    times["event_ms"] = in_turns({"": compressor.event_}, device, repeats // 3, warm=2)[""]
    if graph:
        times |= _resumed_times(step, repeats // 3)
    medians = {name: statistics.median(series) for name, series in times.items()}
    for part, (longer, shorter) in _DIFFERENCES.items():
        medians[part] = medians[longer] - medians[shorter]
    step_ms, baseline_ms = medians["ms"], medians["baseline_ms"]
    medians.setdefault("eager_ms", step_ms)  # without a graph, every step is eager
    # What training without compression does not need, with a step's share of an event.
    recapture_ms = medians.get("resumed_ms", 0.0) - medians.get("replayed_ms", 0.0)
    event_ms = medians["event_ms"] + max(recapture_ms, 0.0)
    overhead_ms = medians["machinery_ms"] + event_ms / config.compress.interval
    tokens = step.inputs.shape[0] * step.inputs.shape[1] * positions(config.task)
    # Two operations per multiply-add; the backward pass takes twice the work of the forward pass.
    flops = 6 * work * tokens
    return {
        **medians,
        "quartiles": {name: quartiles(series) for name, series in times.items()},
        "graph": graph,
        "machinery_share": overhead_ms / baseline_ms,
        "tokens_per_s": 1000 * tokens / step_ms,
        "tflops": flops / (step_ms * 1e9),
        "matrix_tflops": matrix_rate(device),
        "peak_gib": peak,
        "multiple": multiple,
        "interval": config.compress.interval,
        "fma": work,
        "fma_exact": work_per_token(build_exact()),
        "fma_after_events": work_per_token(step.model),
        "parameters": parameters,
    }


def _step(config: Config, build: Build, device: str) -> TrainingStep:
    # Of the model alone: a teacher may be gone.
    train = dataclasses.replace(config.train, distill=0.0, teacher="")
    step = TrainingStep(build().to(device), dataclasses.replace(config, train=train), device)
    # A tiny learning rate: hundreds of repetitions must not change the weights much.
    step.compressor.set_lr_(1e-6)
    if config.target.named is None:
        # As a course to a work would: with a target of zero every cut would be undone.
        step.compressor.set_loss_target_(2 * abs(step.probe()) + 1)
    return step


def _resumed_times(step: TrainingStep, repeats: int) -> dict[str, list[float]]:
    """The times of two steps after an event, one eager and one captured, and of the two after."""

    def two_steps() -> None:
        step()
        step()

    def before(name: str) -> None:
        if name == "resumed_ms":
            step.compressor.event_()

    names = ("resumed_ms", "replayed_ms")
    return in_turns(dict.fromkeys(names, two_steps), step.device, repeats, warm=1, before=before)


def _part_times(
    step: TrainingStep, exact: TrainingStep | None, graph: bool, repeats: int
) -> dict[str, list[float]]:
    """Time the parts of `step`, each with the parts before it, and the full step of `exact`."""
    config, device, compressor = step.config, step.device, step.compressor
    optimizer = compressor.optimizer
    no_penalty = torch.zeros_like(optimizer.momentum)

    def forward() -> None:
        for inputs, targets in zip(step.inputs, step.targets, strict=True):
            step.forward(inputs, targets)

    @torch.no_grad()
    def optimize() -> None:
        optimizer.store.collect_grads_()
        with reference_kernels(not config.train.fused):
            optimizer.observe_(step.loss.isfinite())
            optimizer.step_(no_penalty, compressor.scalars.rho, compressor.scalars.lr)

    def baseline() -> None:
        step.gradients()
        optimize()

    full = {"ms": step.plain}
    if exact:
        full["ms_exact"] = exact.plain
    parts = {"forward_ms": forward, "gradients_ms": step.gradients, "baseline_ms": baseline}

    def before(name: str) -> None:
        # Only slow norms and events need energies, which are recorded in training mode only.
        step.model.train(name in full)
        for parameter in step.model.parameters():
            parameter.grad = None

    # A captured graph holds as much memory as its step: capture only what is compared in turns.
    groups = [full, *({name: part} for name, part in parts.items())] if graph else [full | parts]
    times: dict[str, list[float]] = {}
    for group in groups:
        captures = {name: GraphedStep(action, graph) for name, action in group.items()}
        times |= in_turns(captures, device, repeats, before=before)
        captures.clear()
    before("ms")
    return times


def _peak_gib(device: str) -> float:
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
