"""Reads and writes of the residual stream, the embedding and the classifier.

Activations are feature-major, [features, tokens]. A site is one contiguous row, so that reads
and writes move whole rows, and matrix products have an aligned leading dimension for every
width. Every removable index is an index of a tensor dim.

Shapes: D sites, N = B*S tokens, d widths, H query heads, G key/value heads, P pairs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gaugelasso import kernels
from gaugelasso.axes import Axis, Cost, Norm, Operation, Size, Slot
from gaugelasso.models.operator_spec import OperatorSpec
from gaugelasso.models.spec import InputKind

# The axis of the residual sites.
STREAM = "D"
# Large compared with a step of Adam, and small enough to be unlearned.
EMBED_STD = 0.1


def normal(shape: tuple[int, ...], std: float, generator: torch.Generator) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, generator=generator) * std)


class Extractor(nn.Module):
    """n_j = x[s_j] / sqrt(eps + sum_i weight_i x[s_i]^2); the gain is folded into the map after it.

    Initially weight = 1/D: the usual RMSNorm. The weights are a buffer that follows the gain
    slowly (gauge.SlowNorms), which keeps every coupling exactly bilinear. `tied` uses
    gain^2 / sum gain^2 instead: the paper's prescaled RMS. The energies that the weights follow
    are mean squares of x, or with `by_token` of n: where tokens differ by orders of magnitude, the
    mean square of x is that of a few of them. `plain` reads x itself, for a stream that
    is normalised in place.
    """

    sites: Tensor
    weight: Tensor
    energy: Tensor

    def __init__(
        self,
        sites: tuple[int, ...],
        *,
        tied: bool,
        eps: float = 0.0,
        by_token: bool = False,
        plain: bool = False,
    ):
        super().__init__()
        self.tied, self.eps, self.by_token, self.plain = tied, eps, by_token, plain
        self.gain = nn.Parameter(torch.ones(len(sites)))
        self.register_buffer("sites", torch.tensor(sites, dtype=torch.long))
        if plain:
            return
        self.register_buffer("weight", torch.full((len(sites),), 1 / len(sites)))
        self.register_buffer("energy", torch.ones(len(sites)))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The stream, which replaces x from here on, and n [d, N]."""
        if self.plain:
            return x, x.index_select(0, self.sites)
        if self.tied:  # no slow weights, so no energies are needed
            weight, energy = self.gain.square() / self.gain.square().sum(), None
        else:
            weight, energy = self.weight, self.energy if self.training else None
        return kernels.read(x, self.sites, weight, energy, self.eps, self.by_token)

    def norms(self, name: str) -> list[Norm]:
        """Its slow normaliser, if it has one."""
        if self.plain or self.tied:
            return []
        names = f"{name}.gain", f"{name}.weight", f"{name}.energy"
        return [Norm(*names, has_eps=self.eps > 0, by_token=self.by_token)]

    def axis(self, owner: str, kind: str, maps: tuple[Slot, ...], *, silences: bool = True) -> Axis:
        """The inputs of an operator: side A is the gain, side B the maps that read them."""
        leaves = ("sites",) if self.plain else ("sites", "weight", "energy")
        riders = tuple(Slot(f"{owner}.read.{leaf}") for leaf in leaves)
        gain, name = Slot(f"{owner}.read.gain"), f"{owner}.{kind}"
        sides = (gain,), maps, riders
        return Axis(name, kind, *sides, owner=owner, silences=silences, growth="permutation")


class Injector(nn.Module):
    """x[t_j] += u_j + scale_j bias_j; the scale is already folded into the map that computes u.

    The bias is there with `bias` alone.
    """

    sites: Tensor

    def __init__(self, sites: tuple[int, ...], bias: bool = False):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(len(sites)))
        self.bias = nn.Parameter(torch.zeros(len(sites))) if bias else None
        self.register_buffer("sites", torch.tensor(sites, dtype=torch.long))

    def forward(self, x: Tensor, u: Tensor) -> Tensor:
        if self.bias is not None:
            u = kernels.add_bias(u, [self.scale * self.bias])
        return kernels.write(x, self.sites, u)

    def axis(self, owner: str, kind: str, maps: tuple[Slot, ...]) -> Axis:
        """The outputs of an operator: side A is what computes them, side B the scale."""
        scale, sites = Slot(f"{owner}.write.scale"), Slot(f"{owner}.write.sites")
        side_a = maps if self.bias is None else (*maps, Slot(f"{owner}.write.bias"))
        name = f"{owner}.{kind}"
        return Axis(name, kind, side_a, (scale,), (sites,), owner=owner, growth="permutation")


@dataclass(frozen=True)
class OperatorOptions:
    """What the operators of a model have in common.

    The first four are those of an `Extractor`. `shrink` scales the first weights of what is
    written. With `write_bias`, what is written has biases.
    """

    tied: bool
    eps: float
    by_token: bool
    plain: bool
    shrink: float
    write_bias: bool
    generator: torch.Generator

    def read(self, sites: tuple[int, ...]) -> Extractor:
        return Extractor(
            sites, tied=self.tied, eps=self.eps, by_token=self.by_token, plain=self.plain
        )

    def write(self, sites: tuple[int, ...]) -> Injector:
        return Injector(sites, self.write_bias)


class Part(nn.Module):
    """A module's entries of the axis table; `name` is the module's name in the model."""

    def axes(self, name: str) -> list[Axis]:
        raise NotImplementedError

    def fixed(self, name: str) -> list[Slot]:
        return []

    def matrices(self, name: str) -> dict[str, int]:
        raise NotImplementedError

    def lookups(self, name: str) -> list[str]:
        """Tables whose rows are pressed only by batches that use them."""
        return []

    def costs(self, name: str) -> list[Cost]:
        raise NotImplementedError

    def norms(self, name: str) -> list[Norm]:
        """The slow normalisers."""
        return []

    def operations(self, name: str) -> list[Operation]:
        """What the part does in its inference form (`inference.operators`), for a profile."""
        raise NotImplementedError


class Operator(Part):
    """A part that reads the stream and writes to it, and that compression may remove."""

    depth: int  # the number of its layer
    read: Extractor
    write: Injector

    def forward(self, x: Tensor, batch: int) -> Tensor:
        """A stream [D, N] of `batch` sequences -> the stream plus this operator's output."""
        raise NotImplementedError

    def norms(self, name: str) -> list[Norm]:
        return self.read.norms(f"{name}.read")

    def spec(self) -> OperatorSpec:
        """The operator's structure, taken from the shapes of its tensors."""
        raise NotImplementedError


def size(axis: str, factor: int = 1) -> Size:
    """The width of one axis, times a whole number."""
    return Size(((axis, factor),))


class Embedding(Part):
    """Rows of a table (tokens) or a linear map (patches), plus learned positions.

    Masked patches are [B, S, n + 1]: for a hidden patch the last value is 1 and the others are
    0. So the last row of the table is the learned token of hidden patches. A `tied` table is the
    map of the classifier too.
    """

    def __init__(
        self,
        inputs: int,
        sites: tuple[int, ...],
        length: int,
        *,
        kind: InputKind,
        positions: bool,
        generator: torch.Generator,
        hold_unseen: bool = False,
        tied: bool = False,
    ):
        super().__init__()
        self.inputs = inputs
        self.tied = tied
        self.tokens = kind == "tokens"
        self.hold_unseen = hold_unseen
        std = EMBED_STD if self.tokens else inputs**-0.5
        rows = inputs + (kind == "masked_patches")
        self.table = normal((rows, len(sites)), std, generator)
        self.positions = normal((length, len(sites)), EMBED_STD, generator) if positions else None
        self.write = Injector(sites)

    def forward(self, inputs: Tensor, size: int) -> Tensor:
        """[B, S] tokens or [B, S, n] patches -> a stream of `size` sites, [D, N]."""
        scale, sites = self.write.scale, self.write.sites
        if self.tokens:
            return kernels.embed(inputs, self.table, self.positions, scale, sites, size)
        rows = inputs @ self.table
        if self.positions is not None:
            rows = rows + self.positions[: inputs.shape[1]]
        rows = rows.flatten(0, 1)
        x = torch.zeros(size, len(rows), device=inputs.device, dtype=self.table.dtype)
        return self.write(x, scale[:, None] * rows.T)

    def axes(self, name: str) -> list[Axis]:
        side_a = [Slot(f"{name}.table", 1)]
        if self.positions is not None:
            side_a.append(Slot(f"{name}.positions", 1))
        return [self.write.axis(name, "d_e", tuple(side_a))]

    def fixed(self, name: str) -> list[Slot]:
        slots = [Slot(f"{name}.table", 0)]
        if self.positions is not None:
            slots.append(Slot(f"{name}.positions", 0))
        return slots

    def matrices(self, name: str) -> dict[str, int]:
        return {} if self.tokens else {f"{name}.table": 1}

    def lookups(self, name: str) -> list[str]:
        return [f"{name}.table"] if self.hold_unseen and self.tokens else []

    def costs(self, name: str) -> list[Cost]:
        axis = (f"{name}.d_e",)
        # The row of the hidden patches' token costs no work, and is not in the paper's figures.
        costs = [Cost("lookup" if self.tokens else "matmul", self.inputs, axis)]
        if self.tied:  # a cost of the classifier, where the table is counted once
            costs = []
        if self.positions is not None:
            costs.append(Cost("lookup", self.positions.shape[0], axis))
        return [*costs, Cost("scale", 1, axis)]

    def operations(self, name: str) -> list[Operation]:
        # At inference the table is as wide as the stream, whatever it writes.
        fixed = (self.inputs, int(self.tokens), int(self.positions is not None))
        return [Operation("embed", (size(STREAM),), fixed)]
