"""The compressor in your own training loop: two additional lines."""

import torch
import torch.nn.functional as F

from gaugelasso import Compressor, CompressorOptions, Transformer, TransformerSpec
from gaugelasso.tasks import Draw, Retrieval


def main(steps: int = 3000) -> Compressor:
    torch.manual_seed(0)
    task = Retrieval(vocabulary=64, modulus=7, length=32)
    spec = TransformerSpec.uniform(
        width=32, layers=2, heads=4, d_k=8, d_v=8, d_f=64, length=32, inputs=64, outputs=65
    )
    model = Transformer(spec)
    compressor = Compressor(
        model, loss_target=0.05, options=CompressorOptions(lr=3e-3, interval=25)
    )

    @compressor.on_drop
    def watch(drop):
        # Called before the cut; return False to keep all, or the indices that may be dropped.
        print(f"step {drop.step}: {drop.axis} loses {len(drop.indices)} channels")
        return True

    for step in range(steps):
        inputs, targets = task.batch(32, Draw(0, step), "cpu")
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        compressor.step(loss)

    print(f"{compressor.fma_initial:,.0f} -> {compressor.fma:,.0f} FMA per token")
    return compressor


if __name__ == "__main__":
    main()
