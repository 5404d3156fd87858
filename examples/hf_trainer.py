"""The Trainer of transformers: the compressor is its optimizer, and a callback ends the run.

pip install 'gaugelasso[trainer]'
python examples/hf_trainer.py
"""

import tempfile
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Trainer, TrainingArguments

from gaugelasso import Compressor, Result, Transformer, TransformerSpec
from gaugelasso.integrations import (
    CompressorCallback,
    CompressorOptimizer,
    CompressorSchedule,
    LossModel,
)

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


def main(steps: int = 400, loss_target: float = 0.25, **arguments: Any) -> Result:
    torch.manual_seed(0)
    spec = TransformerSpec.uniform(
        width=32, layers=1, heads=4, d_k=8, d_v=8, d_f=64, length=2 * COUNT,
        inputs=SYMBOLS + 1, outputs=SYMBOLS,
    )  # fmt: skip
    network = Transformer(spec)
    model = LossModel(network, sorting_loss)
    held_out = sorting(512, seed=1)

    def evaluate() -> Tensor:
        inputs, targets = held_out
        return sorting_loss(network(inputs), targets)

    compressor = Compressor(network, loss_target, steps=steps, evaluate=evaluate)
    optimizer = CompressorOptimizer(compressor, model)
    callback = CompressorCallback(optimizer)
    data = [{"inputs": x, "labels": y} for x, y in zip(*sorting(4096, seed=0), strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=32,
            max_grad_norm=1.0,
            logging_steps=max(steps // 10, 1),
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            dataloader_pin_memory=False,
            disable_tqdm=True,
            **arguments,
        )
        trainer = Trainer(
            model,
            settings,
            train_dataset=data,
            optimizers=(optimizer, CompressorSchedule(optimizer)),
            callbacks=[callback],
        )
        trainer.train()
    result = callback.result
    assert result is not None
    print(f"held: {result.held}; FMA {result.fma_initial:,.0f} -> {result.fma:,.0f}")
    print(result)
    return result


if __name__ == "__main__":
    main()
