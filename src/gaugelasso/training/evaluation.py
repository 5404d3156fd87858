"""Device and precision of a run, and a model's figures on held-out data.

Held-out data come in two streams. SELECTION data decide: how training goes on, which checkpoint a
run ends on. TEST data give the final figures and are read for nothing else.
"""

import math
import platform
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gaugelasso.axes import Compressible
from gaugelasso.compress.courses.window import Measured
from gaugelasso.config import Config
from gaugelasso.distributed import ALONE, Team
from gaugelasso.errors import UserError
from gaugelasso.kernels import reference_kernels
from gaugelasso.tasks import SELECTION, TEST, Draw, Illustrated, Predict, WithEnd, WithFigures


def choose_device(name: str, local: int | None = None) -> str:
    """The device that 'auto' or a torch device name stands for; UserError if it is not there.

    A numbered GPU becomes the current one. `local` is the rank's number on this machine, and
    the number of its GPU.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and local is not None:
        name = f"cuda:{local}"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"device {name!r} is unknown; use auto, cpu or cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device {name!r} is not supported; use auto, cpu or cuda")
    count = torch.cuda.device_count() if device.type == "cuda" else 1
    if (device.index or 0) >= count:
        kind = "CUDA devices" if device.type == "cuda" else "CPU, called cpu"
        raise UserError(f"device {name!r} is not there: this machine has {count} {kind}")
    if device.index is not None and device.type == "cuda":
        torch.cuda.set_device(device)  # streams, captures and kernels go to the current one
    return name


def configure_cpu_(config: Config, device: str) -> None:
    """Set the number of threads, and on an ARM CPU turn oneDNN off for float32.

    There oneDNN compiles a kernel for every product with a transposed right side: half a
    millisecond each, however small the product.
    """
    if config.train.threads:
        torch.set_num_threads(config.train.threads)
    if device == "cpu" and platform.machine().lower() in ("aarch64", "arm64"):
        torch.backends.mkldnn.set_flags(in_bfloat16(config, device), _fp32_precision=None)


def in_bfloat16(config: Config, device: str) -> bool:
    """'auto' is bfloat16 on a GPU and float32 elsewhere."""
    precision = config.train.precision
    return precision == "bfloat16" or (precision == "auto" and device.startswith("cuda"))


def autocast(config: Config, device: str) -> torch.autocast:
    # Weights are used once a step: nothing to cache, and a cache breaks capture.
    enabled = in_bfloat16(config, device)
    kind = torch.device(device).type
    return torch.autocast(kind, torch.bfloat16, enabled=enabled, cache_enabled=False)


@torch.no_grad()
def evaluate(
    model: Compressible,
    config: Config,
    batches: int,
    device: str,
    team: Team = ALONE,
    stream: int = SELECTION,
) -> Measured:
    """Mean loss and metric over the first `batches` of a held-out stream.

    Ranks share the batches. The result is the same for any number of ranks.
    """
    predict = predictor(model, config, device)
    rows = torch.zeros(batches, 2, device=device, dtype=torch.float64)
    for draw in _draws(config, batches, stream)[team.rank :: team.size]:
        inputs, targets = config.task.batch(config.train.batch, draw, device)
        outputs = predict(inputs)
        with reference_kernels(not config.train.fused):
            loss = config.task.loss(outputs, targets)
        rows[draw.index, 0] = loss
        rows[draw.index, 1] = config.task.metric(outputs, targets)  # a tensor or a number
    team.sum_(rows)  # each row is zero on all ranks but one
    loss, metric = rows.mean(dim=0).tolist()
    spread = rows[:, 0].std(correction=0).item()
    return Measured(loss, metric, spread / math.sqrt(max(batches - 1, 1)))


def samples(model: Compressible, config: Config, device: str) -> dict[str, np.ndarray]:
    """The task's pictures of the first selection batch; empty if it has none."""
    if not isinstance(config.task, Illustrated):
        return {}
    (draw,) = _draws(config, 1, SELECTION)
    inputs, targets = config.task.batch(config.train.batch, draw, device)
    shown = config.task.samples(predictor(model, config, device)(inputs), targets)
    return {name: images.cpu().numpy() for name, images in shown.items()}


@torch.no_grad()
def final_figures(
    model: Compressible, config: Config, batches: int, device: str, stream: int
) -> dict[str, float]:
    """The task's figures beside loss and metric, on the first `batches` of a held-out stream."""
    task = config.task
    if not isinstance(task, WithFigures):
        return {}
    predict = predictor(model, config, device)
    draws = _draws(config, batches, stream)
    with reference_kernels(not config.train.fused):
        return task.final_figures(predict, config.train.batch, draws, device)


@dataclass(frozen=True)
class HeldOut:
    """A model's figures on a held-out stream."""

    loss: float
    metric: float
    figures: dict[str, float]


def final_evaluation(
    model: Compressible, config: Config, device: str, team: Team, stream: int
) -> HeldOut:
    """Loss, metric and the task's further figures on a held-out stream, for the end of a run.

    A task's own figures may include loss and metric, over more data; these replace the others.
    """
    batches, name = config.train.final_batches, config.task.metric_name
    loss, metric, _ = evaluate(model, config, batches, device, team, stream)
    figures = team.on_rank0(lambda: final_figures(model, config, batches, device, stream))
    return HeldOut(figures.pop("loss", loss), figures.pop(name, metric), figures)


@torch.no_grad()
def whole_figures(model: Compressible, config: Config, device: str) -> dict[str, float]:
    """The task's figures over all its test data; UserError if these have no end."""
    task = config.task
    if not isinstance(task, WithEnd) or not task.has_end:
        raise UserError(
            f"--whole: the test data of task {config.task_name!r} are not finite; use --batches"
        )
    predict = predictor(model, config, device)
    with reference_kernels(not config.train.fused):
        return task.whole_figures(predict, config.train.batch, device, TEST)


def predictor(model: Compressible, config: Config, device: str) -> Predict:
    """The model in evaluation mode, in the run's precision, without gradients."""
    model.eval()

    @torch.no_grad()
    def predict(inputs: Tensor) -> Tensor:
        with reference_kernels(not config.train.fused), autocast(config, device):
            return model(inputs)

    return predict


def _draws(config: Config, batches: int, stream: int) -> list[Draw]:
    return [Draw(config.train.seed, index, stream) for index in range(batches)]
