"""Reads and writes of the residual stream at inference, each in several forms of equal result.

Activations are token-major: the stream is [N, D], and a token is one contiguous row. Maps are
stored [inputs, outputs], so that a product is `x @ W`: on some CPUs `F.linear` is much slower.
Which form is fastest depends on the device, the widths and the number of tokens, and is measured
(`tuning`).
"""

import math
from typing import Literal

import torch
from torch import Tensor, nn

from gaugelasso.kernels.dispatch import fused
from gaugelasso.kernels.stream import EPS
from gaugelasso.kernels.tiles import Tile, applies

# gather: pick the sites that are read. window: read the whole stretch from the first to the
# last of them, with zero rows in the map for the others. The others are for a GPU with Triton, and
# elsewhere the same as one of these. fused: as gather, with normaliser and product in one kernel.
# scaled: as fused, with the normalisers in a kernel before. fused_window, scaled_window: the same
# as window. staged: the normalised sites are copied, for a product of the library. staged_gated:
# the same for SwiGLU, which is part of the product then. Its map has pairs of columns.
ReadForm = Literal[
    "gather", "window", "fused", "scaled", "fused_window", "scaled_window", "staged", "staged_gated"
]
WINDOWS = ("window", "fused_window", "scaled_window")
# scatter: add to the sites that are written. window: add to the stretch from the first to the
# last of them, with zero columns in the map for the others. spread: add to the whole stream what
# a gather spreads out; changes nothing in place. fused: as scatter, within the product, where there
# is a GPU with Triton.
WriteForm = Literal["scatter", "window", "spread", "fused"]


def uses_kernels(tensor: Tensor) -> bool:
    """Whether Triton kernels compute on this tensor: not in a trace, which others will run."""
    return fused(tensor) and not torch.compiler.is_compiling()


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision of sums of squares and of logits that tokens are drawn from."""
    return torch.promote_types(dtype, torch.float32)


class Matrix(nn.Module):
    """A map [inputs, outputs]; with `int8`, as whole numbers times a scale for each output.

    A column of int8 holds W ~ scale q with q from -127 to 127, so it is off by half a scale at
    most. It is expanded for each product: this saves memory, not work.
    """

    values: Tensor
    scale: Tensor | None

    def __init__(self, values: Tensor, int8: bool):
        super().__init__()
        scale = None
        if int8:
            largest = values.abs().amax(0) if len(values) else values.new_zeros(values.shape[1])
            scale = torch.where(largest > 0, largest / 127, 1.0)
            rounded = (values.double() / scale.double()).round().clamp(-127, 127)
            values = rounded.to(torch.int8)
        self.register_buffer("values", values.contiguous())
        self.register_buffer("scale", scale)

    def lay_(self, by_output: bool) -> None:
        """Order the memory by inputs, as it is made, or by outputs; the values are the same."""
        self.values = self.values.T.contiguous().T if by_output else self.values.contiguous()

    def forward(self) -> Tensor:
        """The matrix as numbers to multiply with."""
        if self.scale is None:
            return self.values
        return self.values.to(self.scale.dtype) * self.scale


class Read(nn.Module):
    """maps^T n with n_j = x[s_j] / sqrt(eps + sum_i weight_i x[s_i]^2); 0 without signal.

    The gain is folded into the rows of `maps`. That is exact, as nothing stands between them.
    The slow weights stay: they cannot be folded into the stream, because another reader of the
    same site has another weight, nor into the maps, because the sum of squares does not pass
    through them. Without weights n = x: the stream of a post-norm model is normalised already.
    """

    sites: Tensor
    weight: Tensor | None

    def __init__(
        self,
        sites: Tensor,
        weight: Tensor | None,
        maps: Tensor,
        form: ReadForm,
        int8: bool = False,
        align: int = 1,
        tile: Tile | None = None,
        eps: float = 0.0,
        paired: bool = False,
    ):
        """`sites` [d] in the order of the stream, ascending; `weight` [d]; `maps` [d, c].

        What the product reads is padded to a multiple of `align`, with zero rows in the map. `tile`
        is the one of the kernel's product, where it was measured. `paired`: for SwiGLU, every
        column of the first half of `maps` is stored beside its column of the second half.
        """
        super().__init__()
        self.form: ReadForm = form
        self.tile, self.eps, self.paired = tile, eps, paired
        if paired:
            maps = torch.stack(maps.chunk(2, dim=1), dim=2).flatten(1)
        self.window = form in WINDOWS
        self.start, self.stop = stretch(sites, align if self.window else 1)
        adjacent = self.window or self.stop - self.start == len(sites)
        if self.window:
            if weight is not None:
                weight = placed(weight, sites - self.start, self.stop - self.start)
            maps = placed(maps, sites - self.start, self.stop - self.start)
            sites = torch.arange(self.start, self.stop)
        else:
            sites, maps = padded(sites, align), padded(maps, align)
            weight = None if weight is None else padded(weight, align)
        # The first of adjacent sites, which a kernel reads without looking each one up.
        # Not with padding: it would read on, maybe beyond the stream.
        adjacent = adjacent and self.stop - self.start == len(sites)
        self.first = self.start if adjacent else None
        self.register_buffer("sites", sites)
        self.register_buffer("weight", weight)
        self.maps = Matrix(maps, int8)

    def forward(self, x: Tensor, gated: bool = False, tile: Tile | None = None) -> Tensor:
        """[N, D] -> [N, c]; `gated`: the first half of the columns times silu of the second."""
        plain = self.form in ("gather", "window") or self.weight is None
        if not plain and uses_kernels(x):
            return self._kernels(x, gated, tile or applies(self.tile, len(x)))
        out = self._plain(x)
        if not gated:
            return out
        up, gate = (out[:, 0::2], out[:, 1::2]) if self.paired else out.chunk(2, dim=1)
        return nn.functional.silu(gate) * up

    def _kernels(self, x: Tensor, gated: bool, tile: Tile | None) -> Tensor:
        from gaugelasso.kernels.gpu import levels, products

        assert self.weight is not None
        maps, where = self.maps(), (x, self.sites, self.weight)
        if self.form in ("staged", "staged_gated"):
            order = True if self.paired else None
            normal = levels.normalised_sites(
                *where, self.eps, len(maps), first=self.first, by_token=order
            )
            if self.paired:
                return products.paired_product(normal, maps, tile)
            return products.swiglu(normal @ maps) if gated else normal @ maps
        factors = None
        if self.form in ("scaled", "scaled_window"):
            factors = levels.norm_factors(*where, self.eps, first=self.first)
        return products.read_product(
            *where, maps, self.eps, gated=gated, first=self.first, factors=factors, tile=tile
        )

    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Sites, weight and maps."""
        assert self.weight is not None
        return self.sites, self.weight, self.maps()

    def _plain(self, x: Tensor) -> Tensor:
        start, stop = self.start, self.stop
        if not self.window:
            picked = x.index_select(1, self.sites)
        else:
            picked = x if stop - start == x.shape[1] else x[:, start:stop]
        if self.weight is None:
            return picked @ self.maps()
        return normalised(picked, self.weight, self.eps) @ self.maps()


class Write(nn.Module):
    """x[t_j] += (maps^T h)_j + bias_j, in place where the form allows it.

    The scale is folded into the columns of `maps` and into the bias, if there is one. That is
    exact: it is the last thing that happens to an output before it is added.
    """

    sites: Tensor
    bias: Tensor | None

    def __init__(
        self,
        sites: Tensor,
        maps: Tensor,
        size: int,
        form: WriteForm,
        int8: bool = False,
        align: int = 1,
        tile: Tile | None = None,
        bias: Tensor | None = None,
    ):
        """`sites` [d] in the order of the stream, ascending; `maps` [f, d]; `size` is D; bias [d].

        The outputs are padded to a multiple of `align` with zeros, which are added to some site.
        """
        super().__init__()
        self.form: WriteForm = form
        self.tile = tile
        self.start, self.stop = stretch(sites, align if form == "window" else 1)
        self.first = self.start if self.stop - self.start == len(sites) else None
        if bias is not None:  # placed as the columns of the map are: until then it is one more row
            maps = torch.cat([maps, bias[None]])
        if form == "window":
            maps = placed(maps.T, sites - self.start, self.stop - self.start).T
        else:
            maps = padded(maps.T, align).T
        if bias is not None:
            maps, bias = maps[:-1], maps[-1].clone()
        if form == "scatter":
            sites = padded(sites, align)
        if form == "spread":
            # The sites that are not written read one more column, which is zero.
            sites = torch.full((size,), maps.shape[1]).index_copy(
                0, sites, torch.arange(len(sites))
            )
        self.register_buffer("sites", sites)
        self.register_buffer("bias", bias)
        self.maps = Matrix(maps, int8)

    def forward(self, x: Tensor, h: Tensor, tile: Tile | None = None) -> Tensor:
        """x [N, D] and h [N, f] -> the stream, which replaces x from here on."""
        if self.form == "fused" and uses_kernels(x):
            from gaugelasso.kernels.gpu import products

            x = products.product_write_(
                x,
                h,
                self.maps(),
                self.sites,
                first=self.first,
                tile=tile or applies(self.tile, len(x)),
            )
            if self.bias is None:  # the kernel has none
                return x
            return x.index_add_(1, self.sites, self.bias[: len(self.sites)].expand(len(x), -1))
        if self.form == "window":
            written = x if self.stop - self.start == x.shape[1] else x[:, self.start : self.stop]
            written.addmm_(h, self.maps())
            if self.bias is not None:
                written += self.bias
            return x
        u = h @ self.maps()
        if self.bias is not None:
            u = u + self.bias
        if self.form == "spread":
            return x + nn.functional.pad(u, (0, 1)).index_select(1, self.sites)
        return x.index_add_(1, self.sites, u[:, : len(self.sites)])

    def parts(self) -> tuple[Tensor, Tensor]:
        """Maps and sites."""
        return self.maps(), self.sites


def normalised(picked: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(eps + sum_i weight_i x_i^2) of each row; 0 without signal."""
    # Few operations, and a product with a column rather than a vector: a step of decoding on a CPU
    # has little else to do.
    wide = picked.to(weight.dtype)
    level = (wide * wide) @ weight[:, None]
    if eps:
        level = level + eps
    if eps <= EPS:
        level = nn.functional.threshold(level, EPS, math.inf)
    # A factor of a token with small values may be more than half precision holds.
    return (wide * level.rsqrt()).to(picked.dtype)


def stretch(sites: Tensor, align: int = 1) -> tuple[int, int]:
    """The first of these sites and the one after the last, both moved out to multiples."""
    if not len(sites):
        return 0, 0
    first, last = int(sites.min()), int(sites.max())
    return first // align * align, (last // align + 1) * align


def padded(rows: Tensor, align: int) -> Tensor:
    """Rows with zeros after them, up to a multiple."""
    missing = -len(rows) % align
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows


def placed(rows: Tensor, at: Tensor, size: int) -> Tensor:
    """`size` rows that are zero except for the given ones, which stand at `at`."""
    return rows.new_zeros(size, *rows.shape[1:]).index_copy(0, at, rows)
