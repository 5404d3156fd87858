"""A model that is not a transformer declares its axes: here a plain two-layer perceptron.

The hidden units are one axis: the rows that write them (side A) and the columns that
read them (side B), with the bias as a rider. Inputs and outputs are fixed.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gaugelasso import Axis, AxisTable, Compressible, Compressor, Cost, Slot


class Perceptron(Compressible):
    def __init__(self, inputs: int, hidden: int, outputs: int):
        super().__init__()
        self.up = nn.Parameter(torch.randn(inputs, hidden) * inputs**-0.5)
        self.bias = nn.Parameter(torch.zeros(hidden))
        self.down = nn.Parameter(torch.randn(hidden, outputs) * hidden**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x @ self.up + self.bias) @ self.down

    def axis_table(self) -> AxisTable:
        # relu(c z) = c relu(z) for c > 0, so the bias follows side A: power 1.
        hidden = Axis(
            name="hidden",
            kind="hidden",
            side_a=(Slot("up", 1),),
            side_b=(Slot("down", 0),),
            riders=(Slot("bias", 0, power=1),),
            owner="perceptron",
        )
        inputs, outputs = self.up.shape[0], self.down.shape[1]
        return AxisTable(
            axes=(hidden,),
            fixed=(Slot("up", 0), Slot("down", 1)),
            matrices={"up": 1, "down": 1},
            costs=(Cost("matmul", inputs + outputs, ("hidden",)),),
            required=frozenset({"perceptron"}),
        )

    def structure(self) -> dict:
        return {
            "inputs": self.up.shape[0],
            "hidden": self.up.shape[1],
            "outputs": self.down.shape[1],
        }


def main(steps: int = 1500) -> Compressor:
    generator = torch.Generator().manual_seed(0)
    # A target that four hidden units can express.
    teacher = Perceptron(8, 4, 3).requires_grad_(False)
    for parameter in teacher.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    torch.manual_seed(0)
    model = Perceptron(8, 64, 3)
    compressor = Compressor(model, loss_target=0.05, steps=steps)

    def loss() -> Tensor:
        return F.mse_loss(model(x), teacher(x))

    for _ in range(steps):
        x = torch.randn(256, 8, generator=generator)
        compressor.step(loss)

    result = compressor.finish()
    print(f"hidden units: 64 -> {result.widths['hidden']}, loss {result.loss:.3f}")
    return compressor


if __name__ == "__main__":
    main()
