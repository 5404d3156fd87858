"""A random Llama of 1.2 billion parameters: what compression adds to its steps and to its memory.

    python -m benchmarks.large --out results/large_h200.json
    python -m benchmarks.large --width 64 --layers 2 --vocabulary 512 --batch 1 --device cpu

The model has the shape of Llama-3.2-1B and the settings of an imported model. Channels go by their
harm, as for pretrained weights. Measured are a step by its parts, then the bytes of each parameter
that are held between steps and at the peaks of a step and of an event that cuts, beside what
activations take: the peak of the forward and backward passes alone.
"""

import argparse
import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gaugelasso.bench.measure import bench_step
from gaugelasso.config import Config
from gaugelasso.importing.pretrained import for_pretrained
from gaugelasso.models import Transformer, TransformerSpec
from gaugelasso.runs.environment import environment
from gaugelasso.runs.writing import make_folder, write_json
from gaugelasso.training.evaluation import choose_device
from gaugelasso.training.step import TrainingStep

CUTS = 3


def shape(given: argparse.Namespace) -> TransformerSpec:
    heads = max(1, given.width // 64)
    spec = for_pretrained(
        TransformerSpec.uniform(
            width=given.width,
            layers=given.layers,
            heads=heads,
            kv_heads=max(1, heads // 4),
            d_k=64,
            d_v=64,
            d_f=4 * given.width,
            length=given.length,
            inputs=given.vocabulary,
            outputs=given.vocabulary,
            rope_base=500_000.0,
            eps=1e-5,
        )
    )
    return replace(spec, tied_head=True)


def config_of(given: argparse.Namespace) -> Config:
    task = {"name": "noise", "vocabulary": given.vocabulary, "classes": given.vocabulary}
    return Config.from_dict({
        "task": task | {"length": given.length},
        "target": {"fma": 1.0},
        "compress": {"accounting": "fma", "removal": "harm", "lr": 1e-5},
        "train": {"batch": given.batch, "steps": 4000, "device": given.device},
    })  # fmt: skip


class Memory:
    """Bytes of the device, for each parameter of the whole model."""

    def __init__(self, device: str, parameters: int):
        self._gpu, self._parameters = device.startswith("cuda"), parameters

    def held(self) -> float | None:
        gc.collect()
        return torch.cuda.memory_allocated() / self._parameters if self._gpu else None

    def start(self) -> None:
        if self._gpu:
            torch.cuda.reset_peak_memory_stats()

    def peak(self) -> float | None:
        return torch.cuda.max_memory_allocated() / self._parameters if self._gpu else None


def memory(given: argparse.Namespace) -> dict[str, Any]:
    """Bytes of each parameter, and the widths before and after some cuts."""
    # Eager steps: a captured one keeps the memory of its activations.
    config = config_of(given)
    config = replace(config, train=replace(config.train, graph=False))
    model = Transformer(shape(given)).to(given.device)
    parameters = sum(each.numel() for each in model.parameters())
    watch = Memory(given.device, parameters)
    weights = watch.held()
    step = TrainingStep(model, config, given.device)
    step.load_(0)
    step()
    rows: dict[str, Any] = {"parameters": parameters, "weights": weights, "held": watch.held()}
    watch.start()
    step.gradients()
    rows["gradients_peak"] = watch.peak()
    for parameter in step.model.parameters():
        parameter.grad = None
    watch.start()
    step()
    rows["step_peak"] = watch.peak()
    watch.start()
    fma = [step.compressor.fma]
    for number in range(CUTS):
        step.compressor.event_()
        fma.append(step.compressor.fma)
        step.load_(number + 1)
    rows["event_peak"], rows["fma"] = watch.peak(), fma
    step()
    rows["held_after"] = watch.held()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--vocabulary", type=int, default=128_256)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    given.device = choose_device(given.device)
    found = {**environment(given.device), "bytes": memory(given)}
    print(found["bytes"], flush=True)
    gc.collect()
    if given.device.startswith("cuda"):
        torch.cuda.empty_cache()
    found["step"] = bench_step(config_of(given), shape(given), given.device, given.repeats)
    share = found["step"]["machinery_share"]
    print(f"{found['step']['ms']:.1f} ms a step, of which compression adds {share:.1%}")
    if given.out:
        make_folder(given.out.parent)
        write_json(given.out, found)


if __name__ == "__main__":
    main()
