"""What channels of a pretrained model matter, measured on training windows, by several rankings.

The rankings are those of `benchmarks.one_shot`.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from gaugelasso import kernels
from gaugelasso.axes import named_tensors
from gaugelasso.baselines.efficiency import balanced
from gaugelasso.compress.model_state import ModelState
from gaugelasso.models import Transformer
from gaugelasso.models.operators import Attention, Mlp
from gaugelasso.tasks import Draw, Tokens

RANKINGS = (
    "magnitude", "uniform", "energy", "first", "fisher", "tokens", "utility", "unexplained",
    "operators",
)  # fmt: skip
# Of the mean diagonal of the second moments.
RIDGE = 0.01

Scores = dict[str, Tensor]  # by axis


@dataclass(frozen=True)
class Writer:
    """The map [features, outputs] that writes what the channels of an axis compute.

    A filter is one feature, a value channel one of each head.
    """

    axis: str
    matrix: Tensor
    scale: Tensor
    channel: Tensor  # of each feature

    def by_channel(self, features: Tensor) -> Tensor:
        """Sums of the features of each channel."""
        sums = features.new_zeros(int(self.channel.max()) + 1, *features.shape[1:])
        return sums.index_add_(0, self.channel, features)


def writers(model: Transformer) -> dict[str, Writer]:
    """The writers of a model by the name of their operator."""
    found = {}
    for name, part in model.operators.items():
        if isinstance(part, Attention):
            heads, values, _ = part.out.shape
            matrix, kind = part.out.detach().flatten(0, 1), "d_v"
            channel = torch.arange(values).repeat(heads)
        else:
            assert isinstance(part, Mlp)
            matrix, kind = part.get_parameter("down").detach(), "d_f"
            channel = torch.arange(len(matrix))
        axis = f"operators.{name}.{kind}"
        found[name] = Writer(axis, matrix, part.write.scale.detach(), channel)
    return found


# --- measuring --------------------------------------------------------------------------------


@dataclass
class Moments:
    """Sums over tokens of one operator's features h, and of their slopes s = h dL/dh."""

    windows: int = 0
    slope: Tensor | float = 0.0
    square: Tensor | float = 0.0  # of the slopes of windows, by channel
    tokens: Tensor | float = 0.0  # of the slopes of tokens, by channel
    second: dict[str, Tensor] = field(default_factory=dict)  # h h^T by the weights of tokens


@contextmanager
def features_of(model: Transformer, take: Callable[[str, Tensor, Tensor], None]) -> Iterator[None]:
    """Call `take` with an operator's name, its features [f, N] and the tokens' mean squares [N].

    With gradients on, features have them.
    """
    now: dict[str, Any] = {}
    deliver = kernels.deliver

    def enter(name: str) -> Callable[..., None]:
        def before(module: Any, inputs: Any) -> None:
            now.update(name=name, level=inputs[0].detach().square().mean(0))

        return before

    def delivering(inputs: Tensor, matrix: Tensor, scale: Tensor) -> Tensor:
        take(now["name"], inputs, now["level"])
        return deliver(inputs, matrix, scale)

    def merging(mixed: Tensor, out: Tensor, scale: Tensor) -> Tensor:
        rows = mixed[..., : out.shape[1]].permute(1, 3, 0, 2).reshape(out.shape[:2].numel(), -1)
        take(now["name"], rows, now["level"])
        return (out.flatten(0, 1) * scale).T @ rows

    hooks = [part.register_forward_pre_hook(enter(name)) for name, part in model.operators.items()]
    try:
        with (
            mock.patch.object(kernels, "deliver", delivering),
            mock.patch.object(kernels, "merge_heads", merging),
        ):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def calibrate(model: Transformer, task: Tokens, windows: int, seed: int) -> dict[str, Moments]:
    """Moments of every operator over some training windows."""
    found = {name: Moments() for name in model.operators}
    parts = writers(model)

    def take(name: str, rows: Tensor, level: Tensor) -> None:
        moments, held = found[name], rows.detach()
        for kind, weight in (("plain", torch.ones_like(level)), ("level", 1 / level)):
            weighed = held * (weight / weight.mean())
            if kind not in moments.second:
                moments.second[kind] = held.new_zeros(len(held), len(held))
            moments.second[kind].addmm_(weighed, held.T)

        def slopes(gradient: Tensor) -> None:
            each = parts[name].by_channel(held * gradient)
            moments.windows += 1
            moments.slope += each.sum(1)
            moments.square += each.sum(1).square()
            moments.tokens += each.square().sum(1)

        rows.register_hook(slopes)

    def begin(module: Any, inputs: Any, stream: Tensor) -> Tensor:
        return stream.detach().requires_grad_().clone()

    model.eval().requires_grad_(False)
    hook = model.embedding.register_forward_hook(begin)
    with features_of(model, take):
        for index in range(windows):
            inputs, targets = task.batch(1, Draw(seed, index), "cpu")
            task.loss(model(inputs), targets).backward()
    hook.remove()
    model.requires_grad_(True)
    return found


# --- ranking ----------------------------------------------------------------------------------


def scores_of(ranking: str, state: ModelState, moments: dict[str, Moments]) -> Scores:
    """The scores of a ranking for the axes that may lose channels."""
    assert isinstance(state.model, Transformer)
    parts = writers(state.model)
    if ranking == "utility":
        with balanced(state):
            utility = state.utility()
        return {part.axis: utility[part.axis] for part in parts.values()}
    found = {}
    for name, part in parts.items():
        seen = moments[name]
        if ranking in ("magnitude", "uniform"):
            values = squares(state, part.axis)
            if ranking == "uniform":
                places = values.argsort().argsort() / len(values)
                values = places if part.axis.endswith("d_f") else torch.full_like(values, math.inf)
        elif ranking == "energy":
            written = (part.matrix * part.scale).square().sum(1)
            values = part.by_channel(seen.second["plain"].diagonal() * written)
        else:
            values = torch.as_tensor({"first": seen.slope, "fisher": seen.square}.get(
                ranking, seen.tokens))  # fmt: skip
            values = values.abs() / seen.windows
            if ranking == "unexplained":
                values = values * unexplained(part, seen.second["level"])
        found[part.axis] = values
    return found


def squares(state: ModelState, axis: str) -> Tensor:
    """The sum of the squares of each channel's weights, on both sides."""
    tensors, found = named_tensors(state.model), state.table[axis]
    each = [
        tensors[slot.tensor].detach().movedim(slot.dim, 0).flatten(1).square().sum(1)
        for slot in (*found.side_a, *found.side_b)
    ]
    return torch.stack(each).sum(0)


def unexplained(part: Writer, second: Tensor) -> Tensor:
    """The share of each channel's energy that is left after a regression on all others."""
    energy = second.diagonal()
    left = 1 / torch.cholesky_inverse(torch.linalg.cholesky(ridged(second))).diagonal()
    return part.by_channel(left) / part.by_channel(energy).clamp(min=1e-30)


def ridged(second: Tensor) -> Tensor:
    return second + RIDGE * second.diagonal().mean() * torch.eye(len(second))
