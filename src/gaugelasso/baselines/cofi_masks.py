"""Hard-concrete masks of CoFi (Xia et al. 2022) on the built-in transformer, and their control.

Five families: attention blocks, heads, hidden (residual sites), MLP blocks, intermediate (d_f).
A mask multiplies what it gates: a head the rows of its output map, an intermediate unit those of
its down map, a site the scale of every write to it. A group of heads that shares keys has one mask.

    z = clamp(l + (r - l) sigmoid((log u - log(1 - u) + log a) / T), 0, 1),   u uniform
    P(z > 0) = sigmoid(log a - T log(-l / r))

A Lagrangian lambda_1 (t - s) + lambda_2 (t - s)^2 holds the expected sparsity s to its target t:
the masks descend, the multipliers ascend. Knows nothing of data or schedules.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gaugelasso.axes import Slot, named_tensors, spread
from gaugelasso.baselines.cofi_cost import row_products
from gaugelasso.compress.pricing import Product, count
from gaugelasso.models import Transformer
from gaugelasso.models.operators import Attention, SwiGLU

# The stretched interval and the temperature of the concrete distribution.
LOW, HIGH, TEMPERATURE = -0.1, 1.1, 2 / 3
# The logit of a mask that starts open, and of an intermediate unit, which starts undecided.
OPEN, UNDECIDED = 10.0, 0.0
# Softens the masks that stay, where masks are made deterministic.
_SOFTENING = 0.8
_EPSILON = 1e-6
FAMILIES = ("mha", "head", "hidden", "ffn", "intermediate")


@dataclass(frozen=True)
class Part:
    """The masks of one family in one operator, or of the stream: a slice of all logits."""

    family: str
    owner: str
    start: int
    size: int

    def of(self, values: Tensor) -> Tensor:
        return values[self.start : self.start + self.size]


class Masks:
    """All masks of a model as one vector of logits, with the optimizer of masks and multipliers.

    `terms` are what is to be reduced, as products of widths. `full` is its value without masks.
    Logits stay within plus and minus `bound`: then an open mask is drawn below 1 now and then, and
    a closed one above 0, so that both keep a gradient of the loss.
    """

    def __init__(
        self,
        model: Transformer,
        terms: Sequence[Product],
        rate: float,
        seed: int,
        bound: float = math.inf,
    ):
        self._table, self._terms, self._bound = model.axis_table(), terms, bound
        tensors = named_tensors(model)
        self._widths = self._table.widths(tensors)
        stream = self._table["D"]
        self._sites = {self._table.home(s): tensors[str(s.link)] for s in stream.linked()}
        self.parts = list(_parts(model))
        size = sum(part.size for part in self.parts)
        device = model.sites.device
        noise = torch.randn(size, generator=torch.Generator().manual_seed(seed))
        start = torch.cat(
            [
                torch.full((part.size,), UNDECIDED if part.family == "intermediate" else OPEN)
                for part in self.parts
            ]
        )
        self.logits = (start + 0.01 * noise).to(device).requires_grad_()
        self.multipliers = torch.zeros(2, device=device, requires_grad=True)
        for tensor in (self.logits, self.multipliers):  # a CUDA graph needs fixed addresses
            tensor.grad = torch.zeros_like(tensor)
        graph = self.logits.is_cuda  # the optimizers then count their steps on the device
        self._descent = torch.optim.Adam([self.logits], lr=rate, capturable=graph)
        self._ascent = torch.optim.Adam(
            [self.multipliers], lr=rate, maximize=True, capturable=graph
        )
        # A row of axes for each term, filled up with an axis of width 1 after the last one.
        number = {axis.name: k for k, axis in enumerate(self._table.axes)}
        most = max(len(term.axes) for term in terms)
        rows = [[number[name] for name in term.axes] for term in terms]
        rows = [row + [len(number)] * (most - len(row)) for row in rows]
        self._axes = torch.tensor(rows, device=device)
        self._factors = torch.tensor([term.factor for term in terms], device=device)
        every = torch.ones(size, device=device)
        self.full = float(self._cost(every))

    @property
    def least(self) -> float:
        """The cost of the smallest dense model: `fewest` residual sites stay, and no block."""
        blocks = {part.owner for part in self.parts if part.owner}
        widths = {
            axis.name: min(self.fewest, self._widths[axis.name]) * (axis.owner not in blocks)
            for axis in self._table.axes
        }
        return float(count(self._terms, widths))

    @property
    def fewest(self) -> int:
        """The fewest residual sites: as many as are expected open with all masks closed."""
        closed = 1 / (1 + math.exp(min(self._bound, 100) + TEMPERATURE * math.log(-LOW / HIGH)))
        size = next(part.size for part in self.parts if part.family == "hidden")
        return max(1, size - round(size * (1 - closed)))

    # --- values -----------------------------------------------------------------------------

    def noise(self, seed: int) -> Tensor:
        """log u - log(1 - u) for each mask, on the CPU: the same numbers for every device."""
        generator = torch.Generator().manual_seed(seed)
        uniform = torch.rand(len(self.logits), generator=generator).clamp(_EPSILON, 1 - _EPSILON)
        return uniform.logit()

    def sample(self, noise: Tensor) -> Tensor:
        """Random masks, a function of the logits and of `noise`, which is on their device."""
        stretched = LOW + (HIGH - LOW) * ((noise + self.logits) / TEMPERATURE).sigmoid()
        return stretched.clamp(0, 1)

    def open_probability(self) -> Tensor:
        """P(z > 0) of every mask."""
        return (self.logits - TEMPERATURE * math.log(-LOW / HIGH)).sigmoid()

    @torch.no_grad()
    def deterministic(self) -> Tensor:
        """Masks without noise: in each part as many zeros as are expected, the rest softened."""
        chance = self.open_probability()
        values = (self.logits / TEMPERATURE * _SOFTENING).sigmoid()
        for part in self.parts:
            zeros = round(part.size - float(part.of(chance).sum()))
            if zeros:
                some = part.of(values)
                some[some.topk(zeros, largest=False).indices] = 0
        return values

    def means(self) -> dict[str, float]:
        """Family -> the mean probability that a mask of it is open."""
        chance = self.open_probability().detach()
        found = {}
        for family in FAMILIES:
            values = [part.of(chance) for part in self.parts if part.family == family]
            found[family] = float(torch.cat(values).mean()) if values else 1.0
        return found

    # --- the constraint ---------------------------------------------------------------------

    def expected(self) -> Tensor:
        """The expected cost, with masks independent of each other."""
        return self._cost(self.open_probability())

    def _cost(self, chance: Tensor) -> Tensor:
        """The cost at the mean widths: heads and blocks scale d_k, d_v and d_f."""
        by = {(part.family, part.owner): part.of(chance) for part in self.parts}
        hidden = by["hidden", ""]
        widths = []
        for axis in self._table.axes:
            owner = axis.owner or ""
            if axis.kind in ("d_k", "d_v"):
                share = by["mha", owner][0] * by["head", owner].mean()
                widths.append(self._widths[axis.name] * share)
            elif axis.kind == "d_f":
                widths.append((by["ffn", owner] * by["intermediate", owner]).sum())
            elif axis.name in self._sites:  # reads or writes some sites of the stream
                widths.append(hidden[self._sites[axis.name]].sum())
            else:
                widths.append(hidden.sum())
        one = hidden.new_ones(())
        return row_products(torch.stack([*widths, one])[self._axes]) @ self._factors

    def lagrangian(self, target: float | Tensor) -> Tensor:
        """lambda_1 (t - s) + lambda_2 (t - s)^2; s and t are shares of the full cost."""
        gap = (self.expected() - target) / self.full
        return self.multipliers[0] * gap + self.multipliers[1] * gap.square()

    def step_(self) -> None:
        """Move masks and multipliers by their gradients, and clear these; bound the logits.

        Gradients that are not finite count as zero: then only the momentum moves them.
        """
        for tensor in (self.logits, self.multipliers):
            assert tensor.grad is not None
            tensor.grad.nan_to_num_(0.0, 0.0, 0.0)
        for optimizer in (self._descent, self._ascent):
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        with torch.no_grad():
            self.logits.clamp_(-self._bound, self._bound)

    # --- on the model -----------------------------------------------------------------------

    def gated(self, model: Transformer, values: Tensor) -> dict[str, Tensor]:
        """The tensors that masks multiply, multiplied: name -> tensor, with gradients."""
        tensors = named_tensors(model)
        by = {(part.family, part.owner): part.of(values) for part in self.parts}
        found: dict[str, Tensor] = {}
        for slot, factor in _gates(model, by):
            found[slot.tensor] = found.get(slot.tensor, tensors[slot.tensor]) * spread(
                factor, slot, tensors
            )
        return found

    @contextmanager
    def applied(self, model: Transformer) -> Iterator[None]:
        """Within the context the model has its deterministic masks."""
        tensors, kept = named_tensors(model), {}
        with torch.no_grad():
            for name, value in self.gated(model, self.deterministic()).items():
                kept[name] = tensors[name].detach().clone()
                tensors[name].copy_(value)
        try:
            yield
        finally:
            with torch.no_grad():
                for name, value in kept.items():
                    tensors[name].copy_(value)

    # --- state, for checkpoints ---------------------------------------------------------------

    def state(self) -> list[float]:
        """All that the next step depends on, as numbers."""
        flat = [self.logits.detach(), self.multipliers.detach()]
        for optimizer, like in ((self._descent, flat[0]), (self._ascent, flat[1])):
            state: dict[str, Any] = next(iter(optimizer.state.values()), {})
            zeros = torch.zeros_like(like)
            flat += [state.get("exp_avg", zeros), state.get("exp_avg_sq", zeros)]
            flat.append(torch.as_tensor(state.get("step", 0.0)).reshape(1).to(like))
        return [float(value) for part in flat for value in part.tolist()]

    def load_(self, values: Sequence[float]) -> None:
        """Take over what `state` gave."""
        n = len(self.logits)
        sizes = [n, 2, n, n, 1, 2, 2, 1]
        if len(values) != sum(sizes):
            raise ValueError(f"{len(values)} numbers of masks in place of {sum(sizes)}")
        parts = torch.tensor(values, dtype=torch.float32, device=self.logits.device).split(sizes)
        with torch.no_grad():
            self.logits.copy_(parts[0])
            self.multipliers.copy_(parts[1])
        pairs = (
            (self._descent, self.logits, parts[2:5]),
            (self._ascent, self.multipliers, parts[5:]),
        )
        for optimizer, tensor, (mean, square, step) in pairs:
            if float(step):
                optimizer.state[tensor] = {
                    "step": step[0].clone(), "exp_avg": mean.clone(), "exp_avg_sq": square.clone()
                }  # fmt: skip


def _parts(model: Transformer) -> Iterator[Part]:
    start = 0

    def part(family: str, owner: str, size: int) -> Part:
        nonlocal start
        start += size
        return Part(family, owner, start - size, size)

    yield part("hidden", "", len(model.sites))
    for name, operator in model.operators.items():
        owner = f"operators.{name}"
        if isinstance(operator, Attention):
            yield part("mha", owner, 1)
            yield part("head", owner, operator.key.shape[1])
        elif isinstance(operator, SwiGLU):
            yield part("ffn", owner, 1)
            yield part("intermediate", owner, operator.up.shape[1])


def _gates(
    model: Transformer, by: Mapping[tuple[str, str], Tensor]
) -> Iterator[tuple[Slot, Tensor]]:
    """What each mask multiplies: a slot, and a factor for each of its positions."""
    hidden, tied = by["hidden", ""], model.initial_spec.norm == "tied"
    yield Slot("embedding.write.scale", link="embedding.write.sites"), hidden
    for name, operator in model.operators.items():
        owner = f"operators.{name}"
        yield Slot(f"{owner}.write.scale", link=f"{owner}.write.sites"), hidden
        if isinstance(operator, Attention):
            groups = by["mha", owner] * by["head", owner]
            shared = operator.query.shape[1] // operator.key.shape[1]
            yield Slot(f"{owner}.out"), groups.repeat_interleave(shared)
        else:
            yield Slot(f"{owner}.down"), by["ffn", owner] * by["intermediate", owner]
    if tied:  # its normaliser is that of the gains, so a site that goes must leave them
        for owner in [*(f"operators.{name}" for name in model.operators), "classifier"]:
            yield Slot(f"{owner}.read.gain", link=f"{owner}.read.sites"), hidden
