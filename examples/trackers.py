"""The figures of a run in a tracker of your own, such as Weights & Biases, MLflow or Aim.

With the trainer, pass a callback. In your own loop, log where you like.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch.nn.functional as F

from gaugelasso import Compressor, Transformer, TransformerSpec
from gaugelasso.config import load_config
from gaugelasso.tasks import Draw, Retrieval
from gaugelasso.training.records import Progress
from gaugelasso.training.trainer import Trainer


class Tracker(Protocol):
    """What most trackers have."""

    def log(self, values: dict[str, float], step: int) -> None: ...


class Printed:
    """Stands for the tracker: prints what it gets."""

    def log(self, values: dict[str, float], step: int) -> None:
        print(f"step {step}:", ", ".join(f"{name} {value:g}" for name, value in values.items()))


def log_rows(tracker: Tracker) -> Callable[[Progress], None]:
    """A callback for the trainer: it is called after each row of metrics.jsonl."""

    def log(progress: Progress) -> None:
        row = {name: value for name, value in progress.row.items() if value is not None}
        step, phase = row.pop("step"), row.pop("phase")
        row |= {"compression": progress.compression, "cooldown": float(phase == "cooldown")}
        tracker.log(row, step=step)

    return log


def with_trainer(config: Path, out: Path, tracker: Tracker) -> None:
    Trainer(load_config(config), out, on_progress=log_rows(tracker)).run()


def with_own_loop(tracker: Tracker, steps: int = 2000, every: int = 50) -> Compressor:
    task = Retrieval(vocabulary=64, modulus=7, length=32)
    spec = TransformerSpec.uniform(
        width=32, layers=2, heads=4, d_k=8, d_v=8, d_f=64, length=32, inputs=64, outputs=65
    )
    model = Transformer(spec)
    compressor = Compressor(model, loss_target=0.05, steps=steps)
    for step in range(1, steps + 1):
        inputs, targets = task.batch(32, Draw(0, step), "cpu")
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        event = compressor.step(loss)
        if step % every == 0:
            figures = {"fma": compressor.fma, "parameters": compressor.parameters}
            tracker.log({"loss": loss.item(), "rho": float(compressor.rho), **figures}, step=step)
        if event is not None and event.dropped:
            tracker.log({"dropped": sum(event.dropped.values())}, step=step)
    result = compressor.finish()
    tracker.log({"final loss": result.loss, "held": float(result.held)}, step=steps)
    return compressor


if __name__ == "__main__":
    with_own_loop(Printed())
