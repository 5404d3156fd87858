"""Edits of sources and of imported models, and what must follow from them."""

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gaugelasso import Transformer
from gaugelasso.axes import named_tensors, width
from gaugelasso.compress.drop import cascade
from gaugelasso.compress.surgery import cut_
from gaugelasso.inference import InferenceModel
from tests.importing.sources import distance


def change(folder: Path, *removed: str, **keys: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | keys
    path.write_text(json.dumps({k: v for k, v in config.items() if k not in removed}))


def rewrite(folder: Path, edit: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    save_file(edit(tensors), path, metadata={"format": "pt"})


def assert_each_has_an_effect(model: Transformer, names: Iterable[str], inputs: Tensor) -> None:
    """None of these parameters was left out of what the model computes."""
    with torch.inference_mode():
        expected = model(inputs)
        for name in names:
            values = model.get_parameter(name)
            before = values.clone()
            values.zero_()
            assert distance(model(inputs), expected) > 1e-3, name
            values.copy_(before)


def cut_out_(model: Transformer, gone: Mapping[str, Collection[int]]) -> None:
    """Cut these indices of these axes, and what goes with them."""
    table, tensors = model.axis_table(), named_tensors(model)
    keeps = {axis.name: torch.ones(width(axis, tensors), dtype=torch.bool) for axis in table.axes}
    for name, indices in gone.items():
        keeps[name][list(indices)] = False
    decision = cascade(table, tensors, keeps)
    assert decision is not None
    cut_(model, table, decision.keeps, decision.removed)


def assert_outputs(model: Transformer, inputs: Tensor, expected: Tensor) -> None:
    """Of the model, of one that is built from its structure, and of its inference form."""
    again = Transformer.from_structure(json.loads(json.dumps(model.structure())))
    again.load_state_dict(model.state_dict())
    with torch.inference_mode():
        for form in (model, again.eval(), InferenceModel(model)):
            assert distance(form(inputs), expected) < 1e-5
