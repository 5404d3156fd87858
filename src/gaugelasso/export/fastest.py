"""The fastest way to run a model on this CPU, by measurement: the inference form, or onnxruntime.

Where products dominate, the inference form is faster; where a pass is many small operations,
onnxruntime.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from gaugelasso.errors import UserError
from gaugelasso.export.extras import check_extra
from gaugelasso.export.source import TRACED
from gaugelasso.export.to_onnx import MODEL, open_sequences
from gaugelasso.inference import InferenceModel, tuned
from gaugelasso.inference.clocks import call_times
from gaugelasso.models import Transformer

# Of the largest output, in float32: an engine that is further away is not taken.
_FAR = 1e-4


@dataclass(frozen=True)
class OnCpu:
    """Call it with tokens [B, S] or patches [B, S, n] of any batch and length.

    `milliseconds` has the engines that were measured, `left_out` the others with the reason.
    """

    engine: str
    milliseconds: dict[str, float]
    run: Callable[[Tensor], Tensor] = field(repr=False)
    left_out: dict[str, str] = field(default_factory=dict)

    @torch.inference_mode()
    def __call__(self, inputs: Tensor) -> Tensor:
        return self.run(inputs)


@torch.inference_mode()
def fastest_on_cpu(model: Transformer, inputs: Tensor, repeats: int = 10) -> OnCpu:
    """Measure the engines that are installed, in float32, on inputs of this batch and length.

    The threads are those that torch has now. UserError if the inputs are not on the CPU.
    """
    if inputs.device.type != "cpu":
        raise UserError(f"fastest_on_cpu: the inputs are on {inputs.device}; give some on the CPU")
    ways: dict[str, Callable[[Tensor], Tensor]] = {"gaugelasso": tuned(model, inputs)}
    left_out = {}
    try:
        check_extra("onnx")
        ways["onnxruntime"] = _in_onnxruntime(model)
        expected = ways["gaugelasso"](inputs)
        off = (ways["onnxruntime"](inputs) - expected).abs().max() / expected.abs().max()
        if not off < _FAR:
            raise UserError(f"its outputs are off by {off:.2g} of the largest")
    except UserError as error:
        ways.pop("onnxruntime", None)
        left_out["onnxruntime"] = str(error)
    actions = {name: (lambda run=run: run(inputs)) for name, run in ways.items()}
    times = {name: 1e3 * each for name, each in call_times(actions, repeats).items()}
    best = min(times, key=times.__getitem__)
    return OnCpu(best, times, ways[best], left_out)


def _in_onnxruntime(model: Transformer) -> Callable[[Tensor], Tensor]:
    served = InferenceModel(model, forms=TRACED)
    with tempfile.TemporaryDirectory() as folder:
        return open_sequences(served, Path(folder) / MODEL, torch.get_num_threads())
