"""Finished runs of tiny random models, after drops on all axes, without any training."""

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gaugelasso.inference import InferenceModel, Sampling, generate
from gaugelasso.models import Transformer, TransformerSpec
from gaugelasso.runs import checkpoint
from tests.contract.models import Case, make, transformer
from tests.docs.pages import DOCS, blocks

STEPS = 40
# Bytes of a text, as the page on serving has them.
TEXT: dict[str, Any] = {"name": "charlm", "path": "docs"}
SUMMARY = {
    "task": "tiny", "seed": 3, "steps": STEPS, "accounting": "fma", "fma_initial": 2000.0,
    "fma_final": 1000.0, "compression": 2.0, "loss_target": 0.6, "loss": 0.5, "held": True,
    "metric": {"name": "bits per byte", "value": 0.75}, "figures": {"perplexity": 2.5},
    "evaluated_on": "test", "parameters_initial": 900, "parameters_final": 512,
}  # fmt: skip


def tiny(layers: int = 2, also: dict[str, Any] | None = None, **settings: Any) -> Transformer:
    """A model of unequal layers: grouped keys, RoPE and learned positions, unless set.

    `also` are fields of the structure that `TransformerSpec.uniform` does not take.
    """
    given = {
        "heads": 4, "kv_heads": 2, "positions": True, "length": 24, "inputs": 256, "outputs": 256,
        "width": 9, "layers": layers,
    } | settings  # fmt: skip
    return make(Case(transformer("exported", also, **given), dropped=True, seed=0)).float()


def stock(layers: int = 3, also: dict[str, Any] | None = None, **settings: Any) -> Transformer:
    """A stock Llama that was cut: sites and the second layer are gone, what is left is equal.

    Gains and scales differ, normalisers have the weights of the width before.
    """
    given = {
        "heads": 4, "kv_heads": 2, "length": 24, "inputs": 256, "outputs": 256, "d_k": 6, "d_v": 6,
        "width": 18, "d_f": 11, "layers": layers, "rope_base": 500.0,
    } | settings  # fmt: skip
    model = Transformer(replace(TransformerSpec.uniform(**given), **also or {}), 0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)
            elif name.endswith("_bias"):
                parameter.normal_(generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith("weight"):
                buffer.fill_(1 / 25)
    for name in ("attention_1", "mlp_1"):
        model.remove_operator(name)
    return model.eval()


class _Saved:
    """What `checkpoint.save` needs."""

    def __init__(self, model: Transformer):
        self.model, self.steps = model, STEPS

    def state_tensors(self) -> dict[str, Tensor]:
        return {"none": torch.zeros(1)}


def write_run(run: Path, model: Transformer, task: dict[str, Any] | None = None) -> Path:
    """A run folder that ended with this model."""
    run.mkdir(parents=True)
    checkpoint.save(run / "checkpoints", _Saved(model), {})
    files = {
        "config": {"task": task or TEXT, "target": {"loss": 0.6, "hold": "final"}},
        "environment": {"date": "2026-01-01T00:00:00+00:00", "hardware": "CPU", "commit": "c0ffee"},
        "summary": SUMMARY,
    }
    for name, data in files.items():
        (run / f"{name}.json").write_text(json.dumps(data))
    return run


def greedy(model: Transformer, prompts: list[list[int]], new: int) -> list[list[int]]:
    """What this package generates."""
    return generate(InferenceModel(model), prompts, new, sampling=Sampling(temperature=0))


def spread_of(model: Transformer, new: Tensor, expected: Tensor) -> float:
    """The largest deviation, relative to the spread of the outputs."""
    return float((new.float() - expected).abs().max() / expected.std())


def card_example(folder: Path) -> str:
    """The program on a model card."""
    (program,) = (block.text for block in blocks(folder / "README.md") if block.kind == "python")
    return program


@functools.cache
def page_examples() -> list[str]:
    """The programs of the page on serving."""
    return [
        block.text for block in blocks(DOCS / "how-to" / "serving.md") if block.kind == "python"
    ]


def run_example(program: str) -> list[int]:
    """The tokens that a program generates."""
    names: dict[str, Any] = {}
    exec(compile(program, "example", "exec"), names)
    return names["new_tokens"]
