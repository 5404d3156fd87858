"""Measures, on the device of a model, which forms of its operators are fastest, and uses them.

All forms compute the same; where a compiler may get a kernel wrong, `timed_parts` checks it.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import get_args

import torch
from torch import Tensor

from gaugelasso.inference.checks import check_inputs, check_transformer
from gaugelasso.inference.clocks import call_times, fastest, graph_times
from gaugelasso.inference.folding import StreamOrder
from gaugelasso.inference.model import InferenceModel
from gaugelasso.inference.products import without_onednn
from gaugelasso.inference.stream import Matrix
from gaugelasso.inference.timed_parts import Parts
from gaugelasso.memory import says_what_fits
from gaugelasso.models import Transformer

ORDERS: Sequence[StreamOrder] = get_args(StreamOrder)


@torch.inference_mode()
def tuned(
    model: Transformer,
    inputs: Tensor,
    *,
    dtype: torch.dtype = torch.float32,
    int8: bool = False,
    repeats: int = 3,
) -> InferenceModel:
    """The model's inference form with the fastest forms for inputs of this batch and length.

    To tune for decoding, give inputs of length 1. UserError with a batch to try where the whole
    batch needs more memory than there is.
    """
    check_transformer("tuned", model)
    check_inputs(model.spec(), inputs)
    if inputs.device.type == "cuda":
        with says_what_fits(len(inputs), inputs.device):
            return _tuned_for_gpu(model, inputs, dtype, int8, repeats)
    batch, length = inputs.shape[:2]
    on_cpu = inputs.device.type == "cpu"
    # A pass on a CPU is timed with one sequence, and several passes with all of them below.
    parts = Parts(model, dtype, int8, 1 if on_cpu else batch, length, repeats)
    switches = [True, False] if on_cpu and dtype is torch.float32 else [True]
    found = {}
    for onednn in switches:
        with nullcontext() if onednn else without_onednn():
            found[onednn] = parts.choose()
    onednn = min(found, key=lambda each: found[each][1])
    best = InferenceModel(model, dtype=dtype, int8=int8, forms=found[onednn][0])
    best.timings = found[onednn][2]
    best.onednn = onednn
    with says_what_fits(batch, inputs.device):
        if on_cpu and length == 1:
            _fit_step_(best, inputs, repeats)
        if on_cpu and batch > 1:
            best.tokens_per_pass = _fastest_pass(best, inputs, repeats)
    return best


def _fit_step_(model: InferenceModel, inputs: Tensor, repeats: int) -> None:
    """Order the maps by outputs, and compute steps by NumPy, if a step of decoding is faster so.

    A product of one row reads maps by outputs in order. oneDNN would order them anew for each
    product.
    """
    step, onednn = _served(model, inputs), model.onednn
    times = {}
    for by_output in (False, True):
        _order_maps_(model, by_output, onednn)
        times[by_output, False] = call_times({"step": step}, 3 * repeats)["step"]
    if len(inputs) == 1 and model.step_by_numpy_():
        times[True, True] = call_times({"step": step}, 3 * repeats)["step"]
    by_output, by_numpy = fastest(times)[0]
    _order_maps_(model, by_output, onednn)
    model.step_by_numpy_(by_numpy)


def _order_maps_(model: InferenceModel, by_output: bool, onednn: bool) -> None:
    for part in model.modules():
        if isinstance(part, Matrix):
            part.lay_(by_output)
    model.onednn = onednn and not by_output


def _tuned_for_gpu(
    model: Transformer, inputs: Tensor, dtype: torch.dtype, int8: bool, repeats: int
) -> InferenceModel:
    """The fastest forms for each order of the stream, and of both models the faster one."""
    batch, length = inputs.shape[:2]
    made = {}
    for order in ORDERS:
        parts = Parts(model, dtype, int8, batch, length, repeats, order)
        forms, _, timings = parts.choose()
        made[order] = InferenceModel(model, dtype=dtype, int8=int8, forms=forms, stream=order)
        made[order].timings = timings
    ways = {order: _served(each, inputs) for order, each in made.items()}
    best = made[fastest(graph_times(ways, repeats))[0]]
    if model.sites.is_cuda:
        torch.cuda.empty_cache()  # the memory of all the graphs
    return best


def _served(model: InferenceModel, inputs: Tensor) -> Callable[[], object]:
    """What tuning is for: a pass over the inputs, or a step after a long context."""
    if inputs.shape[1] > 1 or not model.generates:
        return partial(model, inputs)
    cache = model.new_cache(len(inputs))

    def step() -> None:
        cache.hold_(cache.length - 1)
        model.decode(inputs[:, 0], cache, static=inputs.is_cuda)

    return step


def _fastest_pass(model: InferenceModel, inputs: Tensor, repeats: int) -> int | None:
    """All sequences at once, or one by one: then activations stay in a core's cache."""

    def serve(tokens: int | None) -> None:
        model.tokens_per_pass = tokens
        model(inputs)

    options = (None, inputs.shape[1])
    return fastest(call_times({each: partial(serve, each) for each in options}, repeats))[0]
