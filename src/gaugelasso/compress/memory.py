"""The accounting `bytes`: memory of the served weights, and of the cache that goes with them.

Weights are what an export holds: every parameter, and the weights of slow normalisers. A table
knows which axis each of their dims is on, so that no cost has to be declared for them.
"""

from dataclasses import dataclass

from torch import nn

from gaugelasso.axes import AxisTable, Tensors
from gaugelasso.compress.pricing import Product

# Bytes of a number.
DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Memory:
    """Bytes of the weights, and of the cache of `batch` sequences of `length` positions.

    A length of 0 is the model's own.
    """

    dtype: str = "bfloat16"
    batch: int = 1
    length: int = 0
    name: str = "bytes"
    unit: str = "bytes"

    def terms(self, table: AxisTable, tensors: Tensors) -> list[Product]:
        size = DTYPES[self.dtype]
        homes = {(s.tensor, s.dim): axis.name for axis in table.axes for s in axis.direct()}
        slow = {norm.weight for norm in table.norms}
        terms = []
        for name, tensor in tensors.items():
            if isinstance(tensor, nn.Parameter) or name in slow:
                axes, numbers = [], size
                for dim, width in enumerate(tensor.shape):
                    if (name, dim) in homes:
                        axes.append(homes[name, dim])
                    else:
                        numbers *= width
                terms.append(Product(tuple(axes), numbers))
        positions = self.batch * (self.length or table.context[0])
        return terms + [
            Product(cost.axes, size * positions * cost.factor * cost.unit)
            for cost in table.costs
            if cost.kind == "cache"
        ]

    def preferred(self, table: AxisTable) -> dict[str, int]:
        return {}
