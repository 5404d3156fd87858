"""A residual network of ReLU blocks whose biases belong to side A of their axis.

A bias that is a rider only follows the units; on side A it counts towards their size. Both keep the
function, because relu(c z) = c relu(z) for c > 0. A block that no unit is left of is removed.

    gaugelasso check examples/residual_relu.py:build
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gaugelasso import Axis, AxisTable, Compressible, Cost, Slot


class Block(nn.Module):
    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.up = nn.Parameter(torch.randn(width, hidden) * width**-0.5)
        self.bias = nn.Parameter(torch.zeros(hidden))
        self.down = nn.Parameter(torch.randn(hidden, width) * hidden**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x @ self.up + self.bias) @ self.down


class ResidualReLU(Compressible):
    """y = (x + sum of ReLU blocks) @ leave; every block may be removed."""

    def __init__(self, inputs: int, width: int, hidden: int, outputs: int, blocks: int):
        super().__init__()
        self.enter = nn.Parameter(torch.randn(inputs, width) * inputs**-0.5)
        self.leave = nn.Parameter(torch.randn(width, outputs) * width**-0.5)
        self.blocks = nn.ModuleDict({str(k): Block(width, hidden) for k in range(blocks)})

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.enter
        for block in self.blocks.values():
            x = x + block(x)
        return x @ self.leave

    def axis_table(self) -> AxisTable:
        (inputs, width), outputs = self.enter.shape, self.leave.shape[1]
        axes, fixed, matrices = [], [], {"enter": 1, "leave": 1}
        for tensor in matrices:
            fixed += [Slot(tensor, 0), Slot(tensor, 1)]
        costs = [Cost("matmul", width * (inputs + outputs), ())]
        for k in self.blocks:
            up, bias, down = (f"blocks.{k}.{part}" for part in ("up", "bias", "down"))
            axes.append(
                Axis(f"hidden_{k}", "hidden", (Slot(up, 1), Slot(bias)), (Slot(down),), owner=k)
            )
            fixed += [Slot(up, 0), Slot(down, 1)]
            matrices |= {up: 1, down: 1}
            costs.append(Cost("matmul", 2 * width, (f"hidden_{k}",)))
        return AxisTable(tuple(axes), tuple(fixed), matrices, costs=tuple(costs))

    def remove_operator(self, name: str) -> None:
        del self.blocks[name]

    def structure(self) -> dict:
        (inputs, width), outputs = self.enter.shape, self.leave.shape[1]
        # By name: a block may be gone.
        hidden = {name: block.up.shape[1] for name, block in self.blocks.items()}
        return {"inputs": inputs, "width": width, "outputs": outputs, "hidden": hidden}

    @classmethod
    def from_structure(cls, structure: dict) -> "ResidualReLU":
        width, hidden = structure["width"], structure["hidden"]
        model = cls(structure["inputs"], width, 0, structure["outputs"], blocks=0)
        model.blocks = nn.ModuleDict({name: Block(width, size) for name, size in hidden.items()})
        return model


def build() -> ResidualReLU:
    return ResidualReLU(inputs=8, width=8, hidden=32, outputs=3, blocks=2)


def batch(number: int = 64) -> tuple[Tensor, Tensor]:
    """Points, and three smooth functions of them to fit."""
    x = torch.randn(number, 8, generator=torch.Generator().manual_seed(0))
    return x, torch.tanh(x[:, :3] * x[:, 3:6])
