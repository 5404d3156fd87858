"""Benchmarks: where the time of a step goes, and what a compressed model gains when served.

Medians of warm repetitions on random batches of a config's task; on a GPU every part is
timed as a CUDA graph, as training runs it. Nothing here is kept of the training done.
"""

import bisect
import dataclasses
import re
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from gaugelasso import checkpoint, pricing
from gaugelasso.axes import named_tensors
from gaugelasso.config import Config
from gaugelasso.evaluation import autocast, settle_cpu_
from gaugelasso.graph import GraphedStep
from gaugelasso.kernels import plainly
from gaugelasso.models import Transformer, TransformerSpec, round_up
from gaugelasso.runs import environment, make_folder, read_json, write_json
from gaugelasso.step import TrainingStep
from gaugelasso.tasks import Draw

Row = dict[str, Any]


# Seconds of repetitions, and the fewest whatever they take.
PATIENCE = 10.0
FEWEST = 3


def median_ms(action: Callable[[], Any], device: str, repeats: int, warm: int = 5) -> float:
    """Median time of one call, after `warm` calls that do not count.

    Either ends when `PATIENCE` seconds are spent, but not before one call and `FEWEST`.
    """
    cuda = device.startswith("cuda")

    def timed() -> float:
        if cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        action()
        if cuda:
            torch.cuda.synchronize()
        return 1000 * (time.perf_counter() - began)

    def series(most: int, fewest: int) -> list[float]:
        times: list[float] = []
        while len(times) < most and (len(times) < fewest or sum(times) < 1000 * PATIENCE):
            times.append(timed())
        return times

    series(warm, 1)
    return statistics.median(series(repeats, FEWEST))


def matrix_rate(device: str, repeats: int = 10) -> float:
    """TFLOP/s of one large matrix product: bfloat16 on a GPU, float32 on a CPU."""
    cuda = device.startswith("cuda")
    size = 8192 if cuda else 1024
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16 if cuda else torch.float32)
    return 2 * size**3 / (median_ms(lambda: a @ a, device, repeats) * 1e9)


def work_per_token(model: Transformer) -> float:
    """Multiply-adds of one token, whatever accounting a config presses by."""
    return pricing.total_fma(model.axis_table(), pricing.ACCOUNTINGS["fma"], named_tensors(model))


def bench_step(
    config: Config, spec: TransformerSpec, device: str, repeats: int, multiple: int = 1
) -> Row:
    """The parts of one training step in ms, and what it achieves.

    Every width of the structure is rounded up to a multiple of `multiple` first, and events
    leave it so.
    """
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
    settle_cpu_(config, device)
    exact = work_per_token(Transformer(spec))
    spec = round_up(spec, multiple)
    if multiple > 1:
        compress = dataclasses.replace(config.compress, multiple=multiple)
        config = dataclasses.replace(config, compress=compress)
    step = TrainingStep(Transformer(spec, config.train.seed).to(device), config, device)
    compressor, optimizer = step.compressor, step.compressor.optimizer
    compressor.set_lr_(1e-6)  # hundreds of repetitions should leave the weights where they are
    no_penalty = torch.zeros_like(optimizer.momentum)

    def forward() -> None:
        for inputs, targets in zip(step.inputs, step.targets, strict=True):
            step.forward(inputs, targets)

    @torch.no_grad()
    def optimize() -> None:
        optimizer.store.collect_grads_()
        with plainly(not config.train.fused):
            optimizer.observe_(step.loss.isfinite())
            optimizer.step_(no_penalty, compressor.pace.rho, compressor.pace.lr)

    def gradients() -> None:
        for parameter in step.model.parameters():
            parameter.grad = None
        step.gradients()

    def unpressed() -> None:
        step.gradients()
        optimize()

    def timed(action: Callable[[], None]) -> float:
        graph = device.startswith("cuda") and config.train.graph
        return median_ms(GraphedStep(action, graph), device, repeats)

    whole = timed(step.plain)
    peak = _peak_gib(device)
    step.model.eval()  # records no energies, which slow norms and events alone need
    ahead, there, baseline = timed(forward), timed(gradients), timed(unpressed)
    step.model.train()
    times = {
        "forward_ms": ahead,
        "backward_ms": there - ahead,
        "optimizer_ms": baseline - there,
        "baseline_ms": baseline,
        # What the same training without pressure does not need.
        "machinery_ms": whole - baseline,
        "eager_ms": median_ms(step.plain, device, max(3, repeats // 5)),
        "event_ms": median_ms(compressor.event_, device, 3, warm=1),
    }
    # The same, with a step's share of an event.
    spent = whole - baseline + times["event_ms"] / config.compress.interval
    tokens = step.inputs.shape[0] * step.inputs.shape[1] * step.inputs.shape[2]
    flops = 6 * work_per_token(step.model) * tokens  # a multiply and an add, forward and twice back
    return {
        "ms": whole,
        **times,
        "machinery_share": spent / baseline,
        "tokens_per_s": 1000 * tokens / whole,
        "tflops": flops / (whole * 1e9),
        "matrix_tflops": matrix_rate(device),
        "peak_gib": peak,
        "multiple": multiple,
        "fma": work_per_token(step.model),
        "fma_exact": exact,
        "parameters": compressor.parameters,
    }


def _peak_gib(device: str) -> float:
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def uniform_like(config: Config, fma: float) -> TransformerSpec:
    """The config's own model, narrowed evenly until its work is nearest to `fma`."""
    full = config.model

    def narrowed(width: int) -> TransformerSpec:
        share, pair = width / full.width, 2 if full.rope else 1
        narrow = dataclasses.replace(
            full,
            width=width,
            d_k=max(pair, pair * round(full.d_k * share / pair)),
            d_v=max(1, round(full.d_v * share)),
            d_f=max(1, round(full.d_f * share)),
        )
        return narrow.spec(config.task)

    def work(width: int) -> float:
        return work_per_token(Transformer(narrowed(width)))

    above = bisect.bisect_left(range(1, full.width), fma, key=work) + 1
    return narrowed(min((max(above - 1, 1), above), key=lambda width: abs(work(width) - fma)))


@torch.inference_mode()
def bench_inference(model: Transformer, config: Config, device: str, repeats: int) -> Row:
    """Latency of one sequence and throughput of a batch, without gradients."""
    model = model.to(device).eval()
    row: Row = {"fma": work_per_token(model)}
    for name, size in (("latency_ms", 1), ("batch_ms", config.train.batch)):
        inputs, _ = config.task.batch(size, Draw(config.train.seed), device)

        def serve(inputs: torch.Tensor = inputs) -> None:
            with plainly(not config.train.fused), autocast(config, device):
                model(inputs)

        row[name] = median_ms(serve, device, repeats)
    row["tokens_per_s"] = 1000 * config.train.batch * config.task.length / row["batch_ms"]
    return row


def bench_run(
    run: Path, work: str, config: Config, device: str, repeats: int
) -> Iterator[tuple[str, Row]]:
    """A run's model against its ancestor and a uniform one of equal work, on every device."""
    compressed = checkpoint.load_model(run)
    models = {
        "ancestor": Transformer(checkpoint.load_spec(run / "initial.json")),
        "uniform": Transformer(uniform_like(config, work_per_token(compressed))),
        "compressed": compressed,
    }
    for kind in dict.fromkeys(["cpu", device]):
        for name, model in models.items():
            row = bench_inference(model, config, kind, repeats)
            yield f"{work}-{name}-{kind}", {"model": name, "device": kind, **row}


def default_file(device: str) -> Path:
    """benchmarks/<hardware>_<date>.json, in letters that every file system knows."""
    around = environment(device)
    name = re.sub(r"[^A-Za-z0-9]+", "-", around["hardware"]).strip("-").lower()
    return Path("benchmarks") / f"{name}_{around['date'][:10]}.json"


def record(path: Path, device: str, kind: str, row: Row) -> None:
    """Put a row into a benchmark file, in place of an older one of the same work."""
    kept = read_json(path) if path.exists() else {}
    rows = [old for old in kept.get(kind, []) if old["work"] != row["work"]]
    new = {**row, "at": _circumstances(row.get("device", device))}
    make_folder(path.parent)
    write_json(path, {**kept, **_circumstances(device), kind: [*rows, new]})


def _circumstances(device: str) -> Row:
    around = environment(device)
    versions = {key: around[key] for key in ("gaugelasso", "torch", "python")}
    return {key: around[key] for key in ("commit", "hardware", "date")} | {"versions": versions}
