"""The fastest way to run a model on this CPU, by measurement: an engine and a number of threads.

Where products dominate, the inference form is faster; where a pass is many small operations,
onnxruntime. A small model is faster with one thread, because threads wait for each other at each
operation.
"""

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from gaugelasso.errors import UserError, first_line
from gaugelasso.export.extras import check_extra
from gaugelasso.export.source import TRACED
from gaugelasso.export.to_onnx import MODEL, open_sequences
from gaugelasso.inference import InferenceModel, tuned
from gaugelasso.inference.checks import check_transformer
from gaugelasso.inference.clocks import call_times
from gaugelasso.models import Transformer

# Of the largest output, in float32: an engine that is further away is not taken.
_FAR = 1e-4

Way = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class OnCpu:
    """Call it with tokens [B, S] or patches [B, S, n] of any batch and length.

    A call uses `threads` threads, and leaves those of torch as they were. `milliseconds` has what
    was measured, by engine and threads, and `left_out` the other engines with the reason.
    """

    engine: str
    threads: int
    milliseconds: dict[tuple[str, int], float]
    run: Way = field(repr=False)
    left_out: dict[str, str] = field(default_factory=dict)

    @torch.inference_mode()
    def __call__(self, inputs: Tensor) -> Tensor:
        with using_threads(self.threads):
            return self.run(inputs)


@contextlib.contextmanager
def using_threads(count: int) -> Iterator[None]:
    """Within this context, torch's operations use so many threads.

    The number is one of the whole process: another Python thread sees it too.
    """
    before = torch.get_num_threads()
    if before != count:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if before != count:
            torch.set_num_threads(before)


@torch.inference_mode()
def fastest_on_cpu(
    model: Transformer, inputs: Tensor, repeats: int = 10, *, compiled: bool = False
) -> OnCpu:
    """Measure the engines that are installed, in float32, on inputs of this batch and length.

    Each is measured with one thread and with as many as torch has now. With `compiled` also the
    inference form under `torch.compile`, with the better number of threads; compiling it takes
    minutes. For whole sequences: to decode, give inputs of length 1 to `tuned`, which chooses
    between PyTorch and NumPy. UserError if the inputs are not on the CPU.
    """
    check_transformer("fastest_on_cpu", model)
    if inputs.device.type != "cpu":
        raise UserError(f"fastest_on_cpu: the inputs are on {inputs.device}; give some on the CPU")
    counts = sorted({1, torch.get_num_threads()})
    ways: dict[tuple[str, int], Way] = {}
    left_out: dict[str, str] = {}
    for count in counts:
        with using_threads(count):
            ways["gaugelasso", count] = tuned(model, inputs)
    expected = ways["gaugelasso", counts[-1]](inputs)
    try:
        check_extra("onnx")
        others = {("onnxruntime", count): way for count, way in _in_onnxruntime(model, counts)}
        _check_agrees(others, inputs, expected)
        ways |= others
    except UserError as error:
        left_out["onnxruntime"] = str(error)
    times = _times(ways, inputs, repeats)
    if compiled:
        best = min(counts, key=lambda count: times["gaugelasso", count])
        try:
            made = {("compiled", best): _compiled(ways["gaugelasso", best])}
            _check_agrees(made, inputs, expected)
        except Exception as error:  # a compiler of others may fail in any way
            left_out["compiled"] = first_line(error)
        else:
            ways |= made
            times = _times(ways, inputs, repeats)
    engine, threads = min(times, key=times.__getitem__)
    return OnCpu(engine, threads, times, ways[engine, threads], left_out)


def _times(
    ways: Mapping[tuple[str, int], Way], inputs: Tensor, repeats: int
) -> dict[tuple[str, int], float]:
    """Milliseconds of each, in turns."""

    def call(name: tuple[str, int]) -> None:
        with using_threads(name[1]):
            ways[name](inputs)

    actions = {name: partial(call, name) for name in ways}
    return {name: 1e3 * each for name, each in call_times(actions, repeats).items()}


def _check_agrees(ways: Mapping[tuple[str, int], Way], inputs: Tensor, expected: Tensor) -> None:
    for (_, count), way in ways.items():
        with using_threads(count):
            off = (way(inputs) - expected).abs().max() / expected.abs().max()
        if not off < _FAR:
            raise UserError(f"its outputs are off by {off:.2g} of the largest")


def _in_onnxruntime(model: Transformer, counts: list[int]) -> list[tuple[int, Way]]:
    """The model by number of threads."""
    served = InferenceModel(model, forms=TRACED)
    with tempfile.TemporaryDirectory() as folder:
        return open_sequences(served, Path(folder) / MODEL, counts)


def _compiled(served: Way) -> Way:
    # Lengths and batches that follow may differ.
    return torch.compile(served, dynamic=True)
