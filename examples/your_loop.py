"""The compressor in your own training loop: it replaces the optimizer and the schedule."""

import torch
import torch.nn.functional as F
from torch import Tensor

from gaugelasso import Compressor, Transformer, TransformerSpec
from gaugelasso.tasks import SELECTION, Draw, Retrieval


def main(steps: int = 3000) -> Compressor:
    torch.manual_seed(0)
    task = Retrieval(vocabulary=64, modulus=7, length=32)
    spec = TransformerSpec.uniform(
        width=32, layers=2, heads=4, d_k=8, d_v=8, d_f=64, length=32, inputs=64, outputs=65
    )
    model = Transformer(spec)

    def held_out() -> Tensor:
        inputs, targets = task.batch(256, Draw(0, stream=SELECTION), "cpu")
        return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    compressor = Compressor(model, loss_target=0.05, steps=steps, evaluate=held_out)

    @compressor.on_drop
    def watch(drop):
        # Called before the cut; return False to keep all, or the indices that may be dropped.
        print(f"step {drop.step}: {drop.axis} loses {len(drop.indices)} channels")
        return True

    def loss() -> Tensor:
        return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    for step in range(steps):
        inputs, targets = task.batch(32, Draw(0, step), "cpu")
        compressor.step(loss)

    print(compressor.finish())
    return compressor


if __name__ == "__main__":
    main()
