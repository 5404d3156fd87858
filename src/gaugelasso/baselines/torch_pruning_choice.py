"""What the package torch-pruning removes from a model, down to a work of our count.

The package ranks and prunes the model's plain modules (`torch_pruning_modules`) step by step, each
to a higher pruning ratio. The indices that it removes are indices of our axes, so a decision for
our own surgery follows from them: no weight of the plain modules is copied back.
"""

import math
from bisect import bisect_left
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gaugelasso.baselines.torch_pruning_modules import (
    Normaliser,
    PlainAttention,
    PlainSwiGLU,
    PlainTransformer,
    plain_of,
    plain_values,
)
from gaugelasso.compress.drop import Decision
from gaugelasso.compress.model_state import ModelState
from gaugelasso.compress.ranking import DropPlanner
from gaugelasso.errors import UserError, first_line
from gaugelasso.models import Transformer
from gaugelasso.models.layers import STREAM

Mode = Literal["magnitude", "group-norm"]
RankingScope = Literal["global", "isomorphic", "local"]
# The package's own strength of regularisation.
REG = 1e-4
# The pruning ratio rises in about as many steps, and importance is measured again after each.
_STEPS = 100


def package() -> Any:
    """The module torch_pruning; UserError with the extra that brings it, if it is missing."""
    try:
        import torch_pruning
    except ImportError as error:
        raise UserError(
            f"the package torch-pruning is needed ({first_line(error)}): "
            "pip install 'gaugelasso[torch-pruning]'"
        ) from None
    return torch_pruning


@dataclass(frozen=True)
class PrunerOptions:
    """Which pruner of the package works, what it compares, and its strength of regularisation."""

    mode: Mode
    ranking: RankingScope
    reg: float

    def pruner(self, plain: PlainTransformer, steps: int = 1) -> Any:
        """The package's pruner of plain modules, whose last step has a pruning ratio of 1."""
        tp, group_norm = package(), self.mode == "group-norm"
        made = tp.pruner.GroupNormPruner if group_norm else tp.pruner.BasePruner
        own = {"reg": self.reg} if group_norm else {}
        attentions = [op for op in plain.operators.values() if isinstance(op, PlainAttention)]
        # Channels that go together: those of all heads, and both halves of a RoPE pair.
        copies = {op.value: op.groups for op in attentions}
        copies |= {one: op.key_copies for op in attentions for one in (op.key, *op.query)}
        with torch.enable_grad():  # the package traces with autograd
            return made(
                plain,
                plain.example(),
                importance=tp.importance.GroupMagnitudeImportance(),
                global_pruning=self.ranking != "local",
                isomorphic=self.ranking == "isomorphic",
                pruning_ratio=1.0,
                iterative_steps=steps,
                ignored_layers=[plain.classifier],
                in_channel_groups={},
                out_channel_groups=copies,
                unwrapped_parameters=[
                    (part.weight, 0) for part in plain.modules() if isinstance(part, Normaliser)
                ],
                forward_fn=lambda plain, inputs: plain.couplings(inputs),
                **own,
            )


class PackageChoice(DropPlanner):
    """The package's pruning of a model."""

    def __init__(self, state: ModelState, options: PrunerOptions):
        super().__init__(state)
        model = state.model
        assert isinstance(model, Transformer)
        self._plain = plain_of(model)
        self._channels = dict(_channels(self._plain))
        widths = state.widths()
        axes = dict.fromkeys(name for name, _ in self._channels.values())
        # The indices that the plain modules still have, in their order.
        self._left = {name: torch.arange(widths[name]) for name in axes}
        self._steps = sum(len(left) for left in self._left.values())
        self._pruner = options.pruner(self._plain, self._steps)
        self._out_channels = package().prune_linear_out_channels

    @property
    def plain(self) -> PlainTransformer:
        """The plain modules, as the package has pruned them so far."""
        return self._plain

    def to_work(self, target: float) -> Decision:
        """What the package removes until the work is at most `target`, or all that it can."""
        step, work, stride = 0, self._state.fma, math.ceil(self._steps / _STEPS)
        while step < self._steps and work > target:
            first, step = step + 1, min(step + stride, self._steps)
            groups = self._groups(step)
            if (work := self._work(groups)) <= target:  # within this stride, no more than is needed
                enough = first + bisect_left(
                    range(first, step), True, key=lambda n: self._work(self._groups(n)) <= target
                )
                groups = self._groups(enough)
                if self._decision(groups) is None:
                    groups = self._groups(enough - 1) if enough > first else []
            self._prune_(groups)
        decision = self._decision([])
        assert decision is not None  # nothing is pruned that leads to none
        return decision

    def _groups(self, step: int) -> list[Any]:
        """The groups of channels that the package removes in a step of its schedule."""
        self._pruner.current_step = step - 1
        return list(self._pruner.step(interactive=True))

    def _work(self, groups: list[Any]) -> float:
        """Work per token without these groups; -inf if a required operator would go with them."""
        return self.work_of(self._decision(groups))

    def _decision(self, groups: list[Any]) -> Decision | None:
        """What is left without these groups leads to, as our surgery needs it."""
        keeps, removed = self.keep_all(), self._removed(groups)
        for name, left in self._left.items():
            keeps[name].zero_()
            keeps[name][_without(left, removed.get(name, ()))] = True
        return self.closed(keeps)

    def _removed(self, groups: list[Any]) -> dict[str, set[int]]:
        """Axis name -> the positions in `_left` that groups remove."""
        found: dict[str, set[int]] = {}
        for dependency, positions in (item for group in groups for item in group):
            module = dependency.target.module
            if module in self._channels and dependency.handler == self._out_channels:
                name, copies = self._channels[module]
                width = module.out_features // copies
                found[name] = {position % width for position in positions}
        return found

    def _prune_(self, groups: list[Any]) -> None:
        for name, positions in self._removed(groups).items():
            self._left[name] = _without(self._left[name], positions)
            owner, _, kind = name.rpartition(".")
            if kind == "d_k":  # the package knows nothing of buffers
                attention = self._plain.get_submodule(owner)
                assert isinstance(attention, PlainAttention)
                if attention.rope:
                    attention.frequencies = _without(attention.frequencies, positions)
        for group in groups:
            group.prune()


class GroupNormRegularizer:
    """The package's group-norm regularisation, as a part of our own gradients."""

    def __init__(self, model: Transformer, options: PrunerOptions):
        self._plain = plain_of(model)
        self._maps = {
            f"{name}.weight": module.weight
            for name, module in self._plain.named_modules()
            if isinstance(module, nn.Linear)
        }
        self._pruner = options.pruner(self._plain)
        self._pruner.update_regularizer()

    def gradients(self, model: Transformer) -> dict[str, Tensor]:
        """Its gradient for each parameter of the model that it reaches, by name.

        The model has the structure that it was made for. The package adds to the gradients of
        plain maps. A map is a product of a matrix and gains or scales, so the chain rule leads to
        the model's own parameters.
        """
        with torch.enable_grad():
            values = {name: value for name, value in plain_values(model) if name in self._maps}
        for name, weight in self._maps.items():
            weight.data.copy_(values[name].detach())
            weight.grad = torch.zeros_like(weight)
        self._pruner.regularize(self._plain)
        added = [weight.grad for weight in self._maps.values() if weight.grad is not None]
        own = dict(model.named_parameters())
        found = torch.autograd.grad(
            [values[name] for name in self._maps], list(own.values()), added, allow_unused=True
        )
        return {name: grad for name, grad in zip(own, found, strict=True) if grad is not None}


def _channels(plain: PlainTransformer) -> Iterator[tuple[nn.Module, tuple[str, int]]]:
    """Map -> the axis of its output channels, and how many channels an index of it stands for."""
    if isinstance(plain.embedding, nn.Linear):
        yield plain.embedding, (STREAM, 1)
    for name, operator in plain.operators.items():
        owner = f"operators.{name}"
        if isinstance(operator, PlainAttention):
            yield operator.key, (f"{owner}.d_k", operator.key_copies)
            yield operator.value, (f"{owner}.d_v", operator.groups)
            yield operator.out[0], (STREAM, 1)
        elif isinstance(operator, PlainSwiGLU):
            yield operator.up, (f"{owner}.d_f", 1)
            yield operator.down, (STREAM, 1)


def _without(values: Tensor, positions: Collection[int]) -> Tensor:
    keep = torch.ones(len(values), dtype=torch.bool)
    keep[list(positions)] = False
    return values[keep.to(values.device)]
