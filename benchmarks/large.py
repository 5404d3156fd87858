"""A random Llama of 1.2 billion parameters: what compression adds to its steps and to its memory.

    python -m benchmarks.large --out results/large_h200.json
    python -m benchmarks.large --width 64 --layers 2 --vocabulary 512 --batch 1 --device cpu

The model has the shape of Llama-3.2-1B and the settings of an imported model. Channels go by their
harm, as for pretrained weights. Measured are the bytes of each parameter that are held between
steps and at the peaks of a step and of events: one whose cut stays, and one whose cuts are all
undone, which tries the most. Then a step by its parts, and an event. All peaks include activations,
of which `gradients_peak` is the peak of the forward and backward passes alone.
"""

import argparse
import gc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gaugelasso.bench.measure import bench_step
from gaugelasso.compress.events import Event
from gaugelasso.config import Config
from gaugelasso.importing.pretrained import for_pretrained
from gaugelasso.models import Transformer, TransformerSpec
from gaugelasso.runs.environment import environment
from gaugelasso.runs.writing import make_folder, write_json
from gaugelasso.training.evaluation import choose_device
from gaugelasso.training.step import TrainingStep

# Events whose cuts stay.
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
    """Bytes of each parameter, and what each event cut."""
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
    step.model.zero_grad()
    watch.start()
    step()
    rows["step_peak"] = watch.peak()
    # Twice the loss, as a course to a work presses: its cuts stay. A batch never loses a whole nat
    # by a cut, so the last event undoes all that it tries.
    loss = float(step.loss)
    rows["events"] = []
    for number, allowance in enumerate([abs(loss)] * CUTS + [-1.0]):
        step.compressor.set_loss_target_(2 * abs(loss) + 1, allowance)
        watch.start()
        event = step.compressor.event_()
        rows["events"].append({**cut_by(event), "peak": watch.peak()})
        step.load_(number + 1)
        step()
    peaks = [each["peak"] for each in rows["events"] if each["peak"] is not None]
    rows["event_peak"] = max(peaks, default=None)
    rows["held_after"] = watch.held()
    return rows


def cut_by(event: Event) -> dict[str, Any]:
    """What an event cut: indices, and work per token before and after; and what it undid."""
    return {
        "indices": sum(event.dropped.values()),
        "axes": len(event.dropped),
        "fma_before": event.fma_before,
        "fma": event.fma,
        "undone": sorted(event.undone),
    }


def main(words: Sequence[str] | None = None) -> None:
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
    given = parser.parse_args(words)
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
