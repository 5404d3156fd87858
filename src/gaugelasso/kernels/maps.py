"""Linear maps with the gain of their inputs or the scale of their outputs folded in.

Folding costs one pass over the weights and saves two over the activations. The gradient of a
gain is then a row sum over weights, and that of a scale a column sum. In fused form, the rows
of inputs and of each map's outputs are padded with zeros to multiples of `dispatch.ALIGN`.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from gaugelasso.kernels.dispatch import ALIGN, aligned, fused, work_dtype


def project(inputs: Tensor, gain: Tensor, maps: Sequence[Tensor]) -> Tensor:
    """(gain [maps])^T inputs: inputs [d, N], maps [d, c_i] concatenated -> [sum c_i, N]."""
    if fused(inputs):
        from gaugelasso.kernels.gpu.maps import Project

        inputs = _even(inputs.to(work_dtype(inputs)))
        return Project.apply(inputs, gain, *maps)
    joined = torch.cat(list(maps), 1) if len(maps) > 1 else maps[0]
    return (gain[:, None] * joined).T @ inputs


def _even(inputs: Tensor) -> Tensor:
    """Inputs [d, N] with rows of zeros up to a multiple, which those of a fused read have."""
    odd = inputs.shape[0] % ALIGN
    return F.pad(inputs, (0, 0, 0, ALIGN - odd)) if odd else inputs


def project_rows(inputs: Tensor, gain: Tensor, rows: Tensor) -> Tensor:
    """(rows gain) inputs: inputs [d, N], rows [c, d] -> [c, N], for a map stored by outputs.

    The gain is folded into the inputs, which are fewer than the rows of a large vocabulary. The
    fused form has no kernel of its own; it pads d, as a product of an odd width is slow.
    """
    if fused(inputs):
        inputs = _even(inputs)
        if missing := len(inputs) - len(gain):
            gain, rows = F.pad(gain, (0, missing)), F.pad(rows, (0, missing))
    # Not left to autocast: it would keep the rows that it casts, also those of an earlier step.
    kind = work_dtype(rows)
    return rows.to(kind) @ (gain[:, None] * inputs).to(kind)


def split_rows(rows: Tensor, widths: Sequence[int]) -> list[Tensor]:
    """Rows [sum c_i, N] of `project` -> those of each map [c_i, N], without padding."""
    taken = [aligned(width) if fused(rows) else width for width in widths]
    parts = rows.split(taken)
    return [part[:width] for part, width in zip(parts, widths, strict=True)]


def join_rows(parts: Sequence[Tensor]) -> Tensor:
    """The inverse of `split_rows`."""
    if fused(parts[0]):
        parts = [F.pad(part, (0, 0, 0, -len(part) % ALIGN)) for part in parts]
    return torch.cat(list(parts))


def add_bias(rows: Tensor, biases: Sequence[Tensor]) -> Tensor:
    """Rows [sum c_i, N] of `project` plus biases [c_i] of its maps' outputs."""
    if fused(rows):
        biases = [F.pad(bias, (0, -len(bias) % ALIGN)) for bias in biases]
    return rows + torch.cat(list(biases)).to(rows.dtype)[:, None]


def deliver(inputs: Tensor, matrix: Tensor, scale: Tensor) -> Tensor:
    """(matrix scale)^T inputs: inputs [f, N], matrix [f, d] -> [d, N]."""
    if fused(inputs):
        from gaugelasso.kernels.gpu.maps import Deliver

        return Deliver.apply(inputs, matrix, scale, 1, 1)
    return (matrix * scale).T @ inputs
