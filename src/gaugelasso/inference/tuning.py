"""Measures, on the device of a model, which forms of its operators are fastest, and uses them.

Every read, write and attention is timed alone, on random values of the sizes that it will see. All
forms compute the same, so a wrong choice costs time and nothing else.
"""

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TypeVar, get_args

import torch
from torch import Tensor

from gaugelasso.inference.attention import AttentionForm, attend
from gaugelasso.inference.model import InferenceModel
from gaugelasso.inference.operators import Attention, Classifier, Form, Reader
from gaugelasso.inference.products import without_onednn
from gaugelasso.inference.stream import Read, ReadForm, Write, WriteForm
from gaugelasso.models import Transformer

Name = TypeVar("Name", bound=Hashable)
ATTENTIONS: Sequence[AttentionForm] = get_args(AttentionForm)


@torch.inference_mode()
def tuned(
    model: Transformer,
    inputs: Tensor,
    *,
    dtype: torch.dtype = torch.float32,
    int8: bool = False,
    repeats: int = 3,
) -> InferenceModel:
    """The model's inference form with the fastest forms for inputs of this batch and length."""
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
    best.onednn = onednn
    if on_cpu and batch > 1:
        best.tokens_per_pass = _fastest_pass(best, inputs, repeats)
    return best


def fastest(actions: Mapping[Name, Callable[[], object]], repeats: int) -> tuple[Name, float]:
    """The name of the fastest action, and its seconds.

    The actions take turns, after a call of each that does not count. The shortest time of each
    counts, because other programs only add to it.
    """
    cuda = torch.cuda.is_available()
    times: dict[Name, list[float]] = {name: [] for name in actions}
    for turn in range(repeats + 1):
        for name, action in actions.items():
            if cuda:
                torch.cuda.synchronize()
            start = time.perf_counter()
            action()
            if cuda:
                torch.cuda.synchronize()
            if turn:
                times[name].append(time.perf_counter() - start)
    best = min(times, key=lambda name: min(times[name]))
    return best, min(times[best])


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
    ):
        self.batch, self.length, self.repeats = batch, length, repeats
        self.tokens = batch * length
        # One model per form, from which the parts are taken.
        forms: list[tuple[ReadForm, WriteForm]] = [
            ("gather", "scatter"), ("window", "window"), ("gather", "spread"),
        ]  # fmt: skip
        self.models = {
            form: InferenceModel(model, dtype=dtype, int8=int8, forms=Form(*form)) for form in forms
        }
        self.plain = self.models["gather", "scatter"]

    def choose(self) -> tuple[dict[str, Form], float]:
        """The fastest form of every operator, and the seconds of all of them together."""
        known: dict[Hashable, tuple[Form, float]] = {}
        chosen, total = {}, 0.0
        for name, part in self.plain.readers().items():
            key = _sizes(part)
            if key not in known:
                known[key] = self._choose(name, part)
            chosen[name], seconds = known[key]
            total += seconds
        return chosen, total

    def _choose(self, name: str, part: Reader) -> tuple[Form, float]:
        twins = {form: model.readers()[name] for form, model in self.models.items()}
        x = self._random(self.tokens, len(self.plain.spec.sites))
        reads = {read: partial(twin.read, x) for (read, _), twin in twins.items()}
        read, seconds = fastest(reads, self.repeats)
        form = Form(read)
        if not isinstance(part, Classifier):
            h = self._random(self.tokens, part.write.maps.values.shape[0])
            writes = {
                write: partial(twin.write, x, h)
                for (_, write), twin in twins.items()
                if not isinstance(twin, Classifier)
            }
            write, spent = fastest(writes, self.repeats)
            form, seconds = replace(form, write=write), seconds + spent
        if isinstance(part, Attention):
            q = self._random(self.batch, part.heads, self.length, part.d_k)
            k = self._random(self.batch, part.groups, self.length, part.d_k)
            v = self._random(self.batch, part.groups, self.length, part.d_v)
            causal = self.plain.spec.causal
            ways = {each: partial(attend, q, k, v, causal=causal, form=each) for each in ATTENTIONS}
            attention, spent = fastest(ways, self.repeats)
            form, seconds = replace(form, attention=attention), seconds + spent
        return form, seconds

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
    return fastest({each: partial(serve, each) for each in options}, repeats)[0]
