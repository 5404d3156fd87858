"""A loop with accelerate: the compressor is the optimizer that the Accelerator prepares.

pip install 'gaugelasso[trainer]'
python examples/accelerate_loop.py
"""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from gaugelasso import Compressor, Result, Transformer, TransformerSpec
from gaugelasso.integrations import CompressorOptimizer, LossModel

COUNT, SYMBOLS = 4, 8


def sorting(size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Symbols, a separator and the symbols sorted; at the last COUNT positions, what comes next."""
    generator = torch.Generator().manual_seed(seed)
    symbols = torch.randint(SYMBOLS, (size, COUNT), generator=generator)
    targets = symbols.sort(dim=1).values
    separator = torch.full((size, 1), SYMBOLS)
    return torch.cat([symbols, separator, targets[:, :-1]], dim=1), targets


def sorting_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs[:, -COUNT:].flatten(0, 1), targets.flatten())


def main(steps: int = 400, loss_target: float = 0.25, accumulate: int = 2) -> Result:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    torch.manual_seed(0)
    spec = TransformerSpec.uniform(
        width=32, layers=1, heads=4, d_k=8, d_v=8, d_f=64, length=2 * COUNT,
        inputs=SYMBOLS + 1, outputs=SYMBOLS,
    )  # fmt: skip
    # On its device before the compressor is created, because the compressor holds the weights.
    network = Transformer(spec).to(accelerator.device)
    held_inputs, held_targets = (each.to(accelerator.device) for each in sorting(512, seed=1))

    def evaluate() -> Tensor:
        return sorting_loss(network(held_inputs), held_targets)

    compressor = Compressor(network, loss_target, steps=steps, evaluate=evaluate)
    model = LossModel(network, sorting_loss)
    optimizer = CompressorOptimizer(compressor, model)
    data = TensorDataset(*sorting(4096, seed=0))
    batches = DataLoader(data, batch_size=32 // accumulate, shuffle=True)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)

    while not compressor.done:
        for inputs, labels in batches:
            with accelerator.accumulate(model):
                accelerator.backward(model(inputs, labels)["loss"])
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if compressor.done:
                break

    result = compressor.finish()
    print(f"held: {result.held}; FMA {result.fma_initial:,.0f} -> {result.fma:,.0f}")
    print(result)
    return result


if __name__ == "__main__":
    main()
