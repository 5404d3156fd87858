"""The time of a step by kind of kernel, and its lower bound from arithmetic and memory traffic.

python benchmarks/kernels.py configs/bench/charlm-12l.toml
python benchmarks/kernels.py configs/bench/charlm-12l.toml --structure runs/mine

The lower bounds ("floor") need no GPU. They depend on the work, not on our kernels. A matrix
product takes the time of its arithmetic at the rate of a large product, or of its memory traffic,
whichever is longer. Attention takes the time of its arithmetic, at the widths that its kernels
calculate. Everything else takes the time of its memory traffic. Kernel launches and the work after
the backward pass have no bound here. On a GPU the products of a step are also timed alone, at their
own widths and at the widths that our kernels pad them to.
"""

import argparse
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from gaugelasso.bench.stopwatch import matrix_rate, median_ms
from gaugelasso.config import Config, load_config
from gaugelasso.kernels.cuda_graph import GraphedStep
from gaugelasso.kernels.dispatch import aligned
from gaugelasso.kernels.heads import NARROW
from gaugelasso.models import Transformer, TransformerSpec
from gaugelasso.models.operator_spec import AttentionSpec
from gaugelasso.runs.checkpoint import load_spec
from gaugelasso.training.step import TrainingStep

# FLOP/s of a large product and bytes/s of the memory, both of an H200.
FLOPS, BYTES = 750e12, 4.8e12
REPEATS = 5
# Files in kernels/gpu -> their names in the tables.
OURS = {
    "attention": "attention",
    "heads": "heads",
    "pointwise": "SwiGLU",
    "stream": "stream",
    "entropy": "entropy",
    "maps": "maps",
}
# Parts of the names of library kernels; attention first, because its names contain products.
THEIRS = {
    "attention": ("fmha", "flash", "sdpa", "attention"),
    "products": ("gemm", "nvjet", "cutlass", "xmma"),
}


def products(spec: TransformerSpec, padded: Callable[[int], int]) -> list[tuple[int, int]]:
    """Return the input and output channels of every matrix, also padding those of each head."""
    found = [(len(spec.classify), spec.outputs)]
    for op in spec.operators:
        if isinstance(op, AttentionSpec):
            keys, values = padded(channels(op)), padded(op.values)
            wide = (op.heads + op.kv_heads) * keys + op.kv_heads * values
            found += [(len(op.reads), wide), (op.heads * values, len(op.writes))]
        else:
            found += [(len(op.reads), 2 * op.filters), (op.filters, len(op.writes))]
    return [(padded(rows), padded(cols)) for rows, cols in found]


def floors(spec: TransformerSpec, batch: int) -> dict[str, float]:
    """Return the least seconds of forward and backward over a batch, by kind."""
    tokens, length = batch * spec.length, spec.length
    found: Counter[str] = Counter()

    def moved(kind: str, channels: int) -> None:
        found[kind] += 2 * channels * tokens / BYTES  # bfloat16

    for op in spec.operators:
        # Read forward: in, out; backward: gradient and values in, the stream's gradient in and out.
        # Write forward: in, the stream in and out; backward: in, out.
        moved("stream", 6 * len(op.reads) + 5 * len(op.writes))
        if isinstance(op, AttentionSpec):
            keys, values = aligned(channels(op)), aligned(op.values)
            moved("heads", 4 * ((op.heads + op.kv_heads) * keys + op.kv_heads * values))
            keys, values = calculated(keys, values)
            pairs = batch * op.heads * length**2 / (2 if spec.causal else 1)
            # Forward: scores and weighted values. Backward: scores again, one product a gradient.
            found["attention"] += 2 * pairs * (4 * keys + 3 * values) / FLOPS
        else:
            moved("SwiGLU", 8 * op.filters)
    for rows, cols in products(spec, aligned):
        work, traffic = 2 * rows * cols * tokens / FLOPS, 2 * (rows + cols) * tokens / BYTES
        found["products"] += 3 * max(work, traffic)
    return dict(found)


def channels(op: AttentionSpec) -> int:
    """Return the channels of a key; a RoPE pair has two."""
    return op.keys if op.frequencies is None else 2 * op.keys


def calculated(keys: int, values: int) -> tuple[int, int]:
    """Return the channels that the attention kernels calculate."""
    widest = max(keys, values)
    if widest <= NARROW:
        return tuple(max(16, 1 << (width - 1).bit_length()) for width in (keys, values))
    return (64, 64) if widest <= 64 else (aligned(widest), aligned(widest))


def product_ms(sizes: list[tuple[int, int]], tokens: int) -> float:
    """Time the products of a step alone: of each matrix, and of the gradients of both its sides."""
    maps = [torch.randn(rows, cols, device="cuda").bfloat16() for rows, cols in sizes]
    ins, outs = (
        [torch.randn(size[side], tokens, device="cuda").bfloat16() for size in sizes]
        for side in (0, 1)
    )

    def multiply() -> None:
        for each, into, out in zip(maps, ins, outs, strict=True):
            each.T @ into, each @ out, into @ out.T

    return median_ms(GraphedStep(multiply), "cuda", repeats=20)


def kinds() -> dict[str, str]:
    """Return our own kernels by name, each with its kind."""
    found = {}
    for file, kind in OURS.items():
        module = import_module(f"gaugelasso.kernels.gpu.{file}")
        jitted = (name for name, thing in vars(module).items() if hasattr(thing, "warmup"))
        found |= dict.fromkeys(jitted, kind)
    return found


def measured(step: TrainingStep) -> tuple[dict[str, float], int]:
    """Return the seconds of a step's kernels by kind, and the number of kernels."""
    ours = kinds()

    def profiled(action: GraphedStep) -> tuple[Counter, int]:
        for _ in range(3):
            action()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(REPEATS):
                action()
            torch.cuda.synchronize()
        times, count = Counter(), 0
        for row in profiler.key_averages():
            if row.self_device_time_total > 0:
                name = row.key.lower()
                theirs = (k for k, parts in THEIRS.items() if any(p in name for p in parts))
                kind = ours.get(row.key) or next(theirs, "rest")
                times[kind] += row.self_device_time_total / REPEATS / 1e6
                count += row.count
        return times, count // REPEATS

    gradients, _ = profiled(GraphedStep(step.gradients))
    full, launches = profiled(GraphedStep(step.plain))
    return {**gradients, "update": full.total() - gradients.total()}, launches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--structure", type=Path)
    arguments = parser.parse_args()
    config: Config = load_config(arguments.config)
    spec = config.model.spec(config.task)
    if arguments.structure:
        spec = load_spec(arguments.structure)
    least = floors(spec, config.train.batch * config.train.accumulate)
    rows = {"floor": least}
    if torch.cuda.is_available():
        step = TrainingStep(Transformer(spec, config.train.seed).to("cuda"), config, "cuda")
        step.compressor.set_lr_(1e-6)
        rows["measured"], launches = measured(step)
        print(f"{launches} kernels per step; a large product: {matrix_rate('cuda'):.0f} TFLOP/s")
        del step
        tokens = config.train.batch * config.train.accumulate * spec.length
        alone = [product_ms(products(spec, widths), tokens) for widths in (int, aligned)]
        print("products alone: {:.2f} ms at their own widths, {:.2f} padded".format(*alone))
    columns = sorted({kind for row in rows.values() for kind in row})
    print("ms".rjust(10), *(kind.rjust(10) for kind in [*columns, "sum"]))
    for name, row in rows.items():
        shown = [1000 * row.get(kind, 0.0) for kind in columns]
        print(name.rjust(10), *(f"{ms:10.2f}" for ms in [*shown, sum(shown)]))


if __name__ == "__main__":
    main()
