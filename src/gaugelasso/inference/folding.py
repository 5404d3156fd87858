"""How the parts of a trained model are folded: forms, places of the sites, precision, padding."""

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from gaugelasso.inference.attention import AttentionForm
from gaugelasso.inference.checks import check_choice
from gaugelasso.inference.stream import (
    Read,
    ReadForm,
    Write,
    WriteForm,
    placed,
    statistics_dtype,
    uses_kernels,
)
from gaugelasso.kernels.tiles import Tile
from gaugelasso.models import layers

# The most sequences of a step in one kernel per operator.
WHOLE = 256
# How the stream lies in memory: token by token, or site by site.
StreamOrder = Literal["tokens", "sites"]
StepForm = Literal["parts", "whole"]


@dataclass(frozen=True)
class Form:
    """How one operator reads, writes and attends. All forms compute the same."""

    read: ReadForm = "gather"
    write: WriteForm = "scatter"
    attention: AttentionForm = "sdpa"
    # Of the kernels that these forms have; None where no tile was measured.
    read_tile: Tile | None = None
    write_tile: Tile | None = None
    attention_tile: Tile | None = None
    # parts: a step of decoding has kernels for read, attention and write. whole: one kernel, for
    # up to `WHOLE` sequences on a GPU with Triton; needs a read and a write that are fused. Its
    # programs count in memory of the operator, so steps must not run at the same time.
    step: StepForm = "parts"
    # The tile of a kernel that computes a whole MLP of many tokens, with SwiGLU and without biases,
    # on a GPU with Triton; needs a write that is fused. None: a read and a write.
    joined: Tile | None = None

    def __post_init__(self) -> None:
        check_choice("read", self.read, get_args(ReadForm))
        check_choice("write", self.write, get_args(WriteForm))
        check_choice("attention", self.attention, get_args(AttentionForm))
        check_choice("step", self.step, get_args(StepForm))

    def __str__(self) -> str:
        kinds = ("read", "write", "attention")
        names = ((getattr(self, kind), getattr(self, f"{kind}_tile")) for kind in kinds)
        words = [name if tile is None else f"{name} {tile}" for name, tile in names]
        if self.step != "parts":
            words.append(self.step)
        if self.joined is not None:
            words.append(f"joined {self.joined}")
        return ", ".join(words)


class Folding(NamedTuple):
    """What all parts of a model are folded with: the place of each site, and the precision.

    Widths are padded with zeros to multiples of `align`, because products of odd widths are slow on
    a GPU.
    """

    place: Tensor
    dtype: torch.dtype
    int8: bool = False
    align: int = 1

    @property
    def size(self) -> int:
        """The width of the stream."""
        return self.wide(len(self.place))

    def wide(self, width: int) -> int:
        return -(-width // self.align) * self.align

    def widened(self, maps: Tensor, dim: int) -> Tensor:
        """With zeros, up to the padded width."""
        return widened(maps, dim, self.wide(maps.shape[dim]))

    def read(
        self, part: layers.Extractor, maps: list[Tensor], form: Form, paired: bool = False
    ) -> Read:
        sites, order = self.place[part.sites.cpu()].sort()
        gain = part.gain.detach().cpu()
        # Without slow weights the paper's, which depend on the gain alone: computed once.
        weight = None
        if not part.plain:
            weight = gain.square() / gain.square().sum() if part.tied else part.weight.cpu()
            weight = weight[order].to(statistics_dtype(self.dtype))
        joined = torch.cat([each.detach().cpu().flatten(1) for each in maps], 1)
        folded = (gain[:, None] * joined)[order].to(self.dtype)
        options = (form.read, self.int8, self.align, form.read_tile, part.eps, paired)
        return Read(sites, weight, folded, *options)

    def write(self, part: layers.Injector, maps: Tensor, form: Form) -> Write:
        sites, order = self.place[part.sites.cpu()].sort()
        scale = part.scale.detach().cpu()
        folded = (maps.detach().cpu() * scale)[:, order].to(self.dtype)
        bias = None
        if part.bias is not None:
            bias = (part.bias.detach().cpu() * scale)[order].to(self.dtype)
        options = (form.write, self.int8, self.align, form.write_tile)
        return Write(sites, folded, self.size, *options, bias)

    def spread(self, rows: Tensor, part: layers.Injector) -> Tensor:
        """Rows [n, d] that are added to sites -> rows [n, D] of the stream."""
        columns = (rows.detach().cpu() * part.scale.detach().cpu()).T
        return placed(columns, self.place[part.sites.cpu()], self.size).T.to(self.dtype)


def widened(maps: Tensor, dim: int, width: int) -> Tensor:
    """With zeros at the end of one dim, up to this width."""
    missing = list(maps.shape)
    missing[dim] = width - missing[dim]
    return torch.cat([maps, maps.new_zeros(missing)], dim) if missing[dim] else maps


def counters() -> Tensor:
    """Of the programs that have finished their part of an operator."""
    return torch.zeros(WHOLE, dtype=torch.int32)


def in_one_kernel(form: Form, x: Tensor) -> bool:
    """Whether an operator of this form is one kernel on this stream."""
    wanted = form.step == "whole" and form.write == "fused"
    return wanted and len(x) <= WHOLE and uses_kernels(x)
