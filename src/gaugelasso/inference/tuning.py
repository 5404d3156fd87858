"""Measures, on the device of a model, which forms of its operators are fastest, and uses them.

Every read, write and attention is timed alone, on random values of the sizes that it will see; on a
GPU as a CUDA graph, because launches would hide the differences. All forms compute the same, so
a wrong choice costs time and nothing else.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor

from gaugelasso.inference.attention import AttentionForm, attend
from gaugelasso.inference.clocks import Actions, Name, call_times, graph_times, times_on
from gaugelasso.inference.folding import Form, StreamOrder
from gaugelasso.inference.model import InferenceModel
from gaugelasso.inference.operators import Attention, Classifier, Mlp, Reader
from gaugelasso.inference.products import without_onednn
from gaugelasso.inference.stream import Read, ReadForm, Write, WriteForm
from gaugelasso.kernels.dispatch import available
from gaugelasso.models import Transformer

# Seconds by part (read, write, attention) and form.
Timings = dict[str, dict[Any, float]]
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

    To tune for decoding, give inputs of length 1.
    """
    if inputs.device.type == "cuda":
        return _tuned_for_gpu(model, inputs, dtype, int8, repeats)
    batch, length = inputs.shape[:2]
    on_cpu = inputs.device.type == "cpu"
    # A pass on a CPU is timed with one sequence, and several passes with all of them below.
    parts = _Parts(model, dtype, int8, 1 if on_cpu else batch, length, repeats)
    switches = [True, False] if on_cpu and dtype is torch.float32 else [True]
    found = {}
    for onednn in switches:
        with nullcontext() if onednn else without_onednn():
            found[onednn] = parts.choose()
    onednn = min(found, key=lambda each: found[each][1])
    best = InferenceModel(model, dtype=dtype, int8=int8, forms=found[onednn][0])
    best.timings = found[onednn][2]
    best.onednn = onednn
    if on_cpu and batch > 1:
        best.tokens_per_pass = _fastest_pass(best, inputs, repeats)
    return best


def fastest(times: Mapping[Name, float]) -> tuple[Name, float]:
    """The name of the shortest time, and the time."""
    best = min(times, key=lambda name: times[name])
    return best, times[best]


def _tuned_for_gpu(
    model: Transformer, inputs: Tensor, dtype: torch.dtype, int8: bool, repeats: int
) -> InferenceModel:
    """The fastest forms for each order of the stream, and of both models the faster one."""
    batch, length = inputs.shape[:2]
    made = {}
    for order in ORDERS:
        parts = _Parts(model, dtype, int8, batch, length, repeats, order)
        forms, _, timings = parts.choose()
        made[order] = InferenceModel(model, dtype=dtype, int8=int8, forms=forms, stream=order)
        made[order].timings = timings
    ways = {order: partial(each, inputs) for order, each in made.items()}
    best = made[fastest(graph_times(ways, repeats))[0]]
    if model.sites.is_cuda:
        torch.cuda.empty_cache()  # the memory of all the graphs
    return best


class _Parts:
    """The reads, writes and attentions of a model, and random activations for them."""

    def __init__(
        self,
        model: Transformer,
        dtype: torch.dtype,
        int8: bool,
        batch: int,
        length: int,
        repeats: int,
        order: StreamOrder = "tokens",
    ):
        self.batch, self.length, self.repeats, self.order = batch, length, repeats, order
        self.tokens = batch * length
        self.gpu = model.sites.device.type == "cuda"
        # On a GPU without Triton the forms with kernels would be their references.
        self.kernels = self.gpu and available() and dtype is not torch.float64
        # One model per form, from which the parts are taken.
        forms: list[tuple[ReadForm, WriteForm]] = [("gather", "scatter"), ("window", "window")]
        if not self.gpu:
            forms.append(("gather", "spread"))
        if self.kernels:
            forms.append(("fused", "fused"))
        self.attentions: list[AttentionForm] = ["sdpa", "narrow" if self.kernels else "blocks"]
        self.models = {
            (read, write): InferenceModel(
                model, dtype=dtype, int8=int8, forms=Form(read, write), stream=order
            )
            for read, write in forms
        }
        self.plain = self.models["gather", "scatter"]

    def choose(self) -> tuple[dict[str, Form], float, dict[str, Timings]]:
        """The fastest form of every operator, the seconds of all of them, and all timings."""
        known: dict[Hashable, tuple[Form, float, Timings]] = {}
        chosen, timings, total = {}, {}, 0.0
        for name, part in self.plain.readers().items():
            key = _sizes(part)
            if key not in known:
                known[key] = self._choose(name, part)
            chosen[name], seconds, timings[name] = known[key]
            total += seconds
        return chosen, total, timings

    def _choose(self, name: str, part: Reader) -> tuple[Form, float, Timings]:
        twins = {form: model.readers()[name] for form, model in self.models.items()}
        x = self._stream()
        gated = isinstance(part, Mlp)
        reads = {read: partial(twin.read, x, gated) for (read, _), twin in twins.items()}
        timings: Timings = {"read": self._times(reads)}
        if not isinstance(part, Classifier):
            h = self._random(self.tokens, part.write.maps.values.shape[0])
            timings["write"] = self._times(
                {
                    write: partial(twin.write, x, h)
                    for (_, write), twin in twins.items()
                    if not isinstance(twin, Classifier)
                }
            )
        if isinstance(part, Attention):
            ways = {each: self._attending(part, each) for each in self.attentions}
            timings["attention"] = self._times(ways)
        best = {kind: fastest(times) for kind, times in timings.items()}
        form = Form(**{kind: name for kind, (name, _) in best.items()})
        return form, sum(seconds for _, seconds in best.values()), timings

    def _attending(self, part: Attention, form: AttentionForm) -> Callable[[], object]:
        """Attention of random heads, in the widths that this form has."""
        wide_k, wide_v = part.widths(form)
        sizes = [(part.heads, wide_k), (part.groups, wide_k), (part.groups, wide_v)]
        if self.gpu:  # as projected: token by token
            heads = [self._random(self.batch, self.length, *each) for each in sizes]
            q, k, v = (each.transpose(1, 2) for each in heads)
        else:
            q, k, v = (self._random(self.batch, n, self.length, wide) for n, wide in sizes)
        return partial(attend, q, k, v, causal=self.plain.spec.causal, form=form)

    def _times(self, actions: Actions[Name]) -> dict[Name, float]:
        return times_on("cuda" if self.gpu else "cpu", actions, self.repeats)

    def _stream(self) -> Tensor:
        if self.order == "tokens":
            return self._random(self.tokens, self.plain.width)
        return self._random(self.plain.width, self.tokens).T

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.plain.device).to(self.plain.dtype)


def _sizes(part: Reader) -> Hashable:
    """What the time of an operator depends on: parts of equal sizes are timed once."""
    ends = [each for each in part.modules() if isinstance(each, Read | Write)]
    sizes = [(*each.maps.values.shape, len(each.sites), each.stop - each.start) for each in ends]
    heads = (part.heads, part.groups) if isinstance(part, Attention) else ()
    return (type(part), *sizes, *heads)


def _fastest_pass(model: InferenceModel, inputs: Tensor, repeats: int) -> int | None:
    """All sequences at once, or one by one: then activations stay in a core's cache."""

    def serve(tokens: int | None) -> None:
        model.tokens_per_pass = tokens
        model(inputs)

    options = (None, inputs.shape[1])
    return fastest(call_times({each: partial(serve, each) for each in options}, repeats))[0]
