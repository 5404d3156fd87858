"""Where and in what precision a model runs, and how well it does on held-out data."""

import platform

import numpy as np
import torch
from torch import Tensor

from gaugelasso.config import Config
from gaugelasso.distributed import ALONE, Team
from gaugelasso.errors import UserError
from gaugelasso.kernels import reference_kernels
from gaugelasso.models import Transformer
from gaugelasso.tasks import EVALUATION, Draw, Illustrated, Predict, WithEnd, WithFigures


def choose_device(name: str, local: int | None = None) -> str:
    """'auto' or a torch device, checked; a numbered GPU becomes the current one.

    Of several ranks on a machine, number `local` takes the GPU of that number.
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
    """Threads as the config has them, and on an ARM CPU no oneDNN for float32.

    PyTorch hands it products whose right side is transposed there, and it builds a kernel for
    each anew: half a millisecond, however small the product.
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
    model: Transformer, config: Config, batches: int, device: str, team: Team = ALONE
) -> tuple[float, float]:
    """Mean loss and metric over the first `batches` of the config's held-out stream.

    Ranks share them out; the result is the same for any number of ranks.
    """
    predict = predictor(model, config, device)
    rows = torch.zeros(batches, 2, device=device, dtype=torch.float64)
    for draw in _held_out(config, batches)[team.rank :: team.size]:
        inputs, targets = config.task.batch(config.train.batch, draw, device)
        outputs = predict(inputs)
        with reference_kernels(not config.train.fused):
            loss = config.task.loss(outputs, targets)
        rows[draw.index] = torch.stack([loss, config.task.metric(outputs, targets)])
    team.sum_(rows)  # to each row all ranks but one add zero
    loss, metric = rows.mean(dim=0).tolist()
    return loss, metric


def samples(model: Transformer, config: Config, device: str) -> dict[str, np.ndarray]:
    """What the task shows of the first held-out batch; empty if it shows nothing."""
    if not isinstance(config.task, Illustrated):
        return {}
    (draw,) = _held_out(config, 1)
    inputs, targets = config.task.batch(config.train.batch, draw, device)
    shown = config.task.samples(predictor(model, config, device)(inputs), targets)
    return {name: images.cpu().numpy() for name, images in shown.items()}


@torch.no_grad()
def final_figures(
    model: Transformer, config: Config, batches: int, device: str
) -> dict[str, float]:
    """What the task has to say beside loss and metric, on the same held-out stream."""
    task = config.task
    if not isinstance(task, WithFigures):
        return {}
    predict = predictor(model, config, device)
    draws = _held_out(config, batches)
    with reference_kernels(not config.train.fused):
        return task.final_figures(predict, config.train.batch, draws, device)


def final_evaluation(
    model: Transformer, config: Config, device: str, team: Team = ALONE
) -> tuple[float, float, dict[str, float]]:
    """Loss, metric and the task's further figures on held-out data: what a run is judged by.

    A task's own figures may include loss and metric, over more data; these replace the others.
    """
    batches, name = config.train.final_batches, config.task.metric_name
    loss, metric = evaluate(model, config, batches, device, team)
    figures = team.on_rank0(lambda: final_figures(model, config, batches, device))
    return figures.pop("loss", loss), figures.pop(name, metric), figures


@torch.no_grad()
def whole_figures(model: Transformer, config: Config, device: str) -> dict[str, float]:
    """The task's figures over all its held-out data; UserError where there is no end to it."""
    task = config.task
    if not isinstance(task, WithEnd) or not task.has_end:
        raise UserError(
            f"--whole: task {config.task_name!r} knows no end of its held-out data; use --batches"
        )
    predict = predictor(model, config, device)
    with reference_kernels(not config.train.fused):
        return task.whole_figures(predict, config.train.batch, device)


def predictor(model: Transformer, config: Config, device: str) -> Predict:
    """The model as held-out data meets it."""
    model.eval()

    @torch.no_grad()
    def predict(inputs: Tensor) -> Tensor:
        with reference_kernels(not config.train.fused), autocast(config, device):
            return model(inputs)

    return predict


def _held_out(config: Config, batches: int) -> list[Draw]:
    return [Draw(config.train.seed, index, EVALUATION) for index in range(batches)]
