"""What the masks of CoFi reduce: sums of products of widths. Knows nothing of masks."""

import math
from typing import Any

import torch
from torch import Tensor

from gaugelasso.axes import AxisTable, Tensors
from gaugelasso.compress.pricing import Product


def parameter_terms(table: AxisTable, tensors: Tensors) -> list[Product]:
    """The number of parameters as a function of widths, without the tables of the embedding."""
    homes = {(slot.tensor, slot.dim): axis.name for axis in table.axes for slot in axis.direct()}
    terms = []
    for name, tensor in tensors.items():
        if not tensor.requires_grad or name in ("embedding.table", "embedding.positions"):
            continue
        axes = [homes[name, dim] for dim in range(tensor.ndim) if (name, dim) in homes]
        fixed = [size for dim, size in enumerate(tensor.shape) if (name, dim) not in homes]
        terms.append(Product(tuple(axes), float(math.prod(fixed))))
    return terms


def row_products(rows: Tensor) -> Tensor:
    """`rows.prod(1)`; no part of it reads back to the host, so a CUDA graph can capture it."""
    products: Tensor = _RowProducts.apply(rows)
    return products


class _RowProducts(torch.autograd.Function):
    """The backward pass of `prod` counts zeros on the host. This one needs no count.

    The gradient of an element that is zero is zero here. A mean width of zero comes from sigmoids
    that are zero, and so are their derivatives: no mask's gradient depends on it.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        products = rows.prod(1)
        ctx.save_for_backward(rows, products)
        return products

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        rows, products = ctx.saved_tensors
        least = torch.finfo(rows.dtype).tiny
        return grad[:, None] * (products[:, None] / rows.clamp_min(least))
