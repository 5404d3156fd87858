"""Measures, on the device of a model, which forms of its operators are fastest, and uses them.

Every read, write and attention is timed alone, on random values of the sizes that it will see; on a
GPU as a CUDA graph, because launches would hide the differences. All forms compute the same, which
is checked for the kernels that read and those of whole MLPs, so a wrong choice costs time alone.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import get_args

import torch
from torch import Tensor

from gaugelasso.inference.cache import Cache, CacheRows, NewTokens
from gaugelasso.inference.candidates import TILED, attention_forms, label, read_forms, write_forms
from gaugelasso.inference.clocks import call_times, fastest, graph_times, times_on
from gaugelasso.inference.folded import fold
from gaugelasso.inference.folding import WHOLE, Form, StreamOrder
from gaugelasso.inference.model import InferenceModel
from gaugelasso.inference.operators import Attention, Classifier, Mlp, Reader
from gaugelasso.inference.products import without_onednn
from gaugelasso.inference.stream import Matrix, Read, Write
from gaugelasso.inference.usable import check_agrees, works
from gaugelasso.kernels.dispatch import available
from gaugelasso.kernels.tiles import Tile, candidates, joined_candidates
from gaugelasso.models import Transformer

# Seconds by part (read, write, attention; step, mlp: an operator at once) and form.
Timings = dict[str, dict[str, float]]
# What a form is called, the form, and an action that uses it.
Choice = tuple[str, tuple[Form, Callable[[], object]]]
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
        parts = _Parts(model, dtype, int8, batch, length, repeats, order)
        forms, _, timings = parts.choose()
        made[order] = InferenceModel(model, dtype=dtype, int8=int8, forms=forms, stream=order)
        made[order].timings = timings
    ways = {order: _served(each, inputs) for order, each in made.items()}
    best = made[fastest(graph_times(ways, repeats))[0]]
    if model.sites.is_cuda:
        torch.cuda.empty_cache()  # the memory of all the graphs
    return best


class _Parts:
    """The parts of a model in all of their forms, and random activations for them."""

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
        self.device = model.sites.device
        self.gpu = self.device.type == "cuda"
        # On a GPU without Triton the forms with kernels would be their references.
        self.kernels = self.gpu and available() and dtype is not torch.float64
        self.model = model
        self.plain = InferenceModel(model, dtype=dtype, int8=int8, forms=Form(), stream=order)

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
        form, seconds, timings = Form(), 0.0, {}
        # Attention comes first: the widths of its heads are those of the read and the write.
        kinds = {
            "attention": self._attentions,
            "read": self._reads,
            "write": self._writes,
            "step": self._steps,
            "mlp": self._mlps,
        }
        for kind, ways in kinds.items():
            choices = dict(ways(name, part, form))
            if self.gpu:
                choices = {each: way for each, way in choices.items() if works(way[1])}
            if not choices:
                continue
            times = times_on(
                self.device.type, {each: action for each, (_, action) in choices.items()},
                self.repeats,
            )  # fmt: skip
            best, spent = fastest(times)
            form, seconds, timings[kind] = choices[best][0], seconds + spent, times
        return form, seconds, timings

    def _attentions(self, name: str, part: Reader, form: Form) -> Iterator[Choice]:
        if not isinstance(part, Attention):
            return
        for each in attention_forms(self.gpu, self.kernels, self.length):
            twin = self._folded(name, each)
            assert isinstance(twin, Attention)
            rows = self._random(self.tokens, twin.read.maps.values.shape[1])
            if self.length == 1 and self.plain.generates:
                action = partial(twin.mix_one, rows, *self._context(twin))
            else:
                action = partial(twin.mix, rows, self.batch, causal=self.plain.spec.causal)
            yield label(each.attention, each.attention_tile), (each, action)

    def _context(self, part: Attention) -> tuple[CacheRows, NewTokens]:
        """A full cache of an operator, and the places of the last tokens."""
        length = self.plain.spec.length
        widths = [(part.groups, part.d_k, part.d_v)]
        cache = Cache(widths, self.batch, length, self.plain.dtype, self.device)
        cache.hold_(length - 1)
        return cache.rows(0), cache.new_tokens(static=self.gpu, kernels=self.kernels)

    def _reads(self, name: str, part: Reader, form: Form) -> Iterator[Choice]:
        """Those that agree with a read without kernels: a compiler may get one of them wrong."""
        x, gated = self._stream(), isinstance(part, Mlp)
        expected = None
        if self.kernels:
            expected = self._folded(name, replace(form, read="gather")).read(x, gated)
        for read in read_forms(self.kernels, self.order, self.tokens, gated):
            twin = self._folded(name, replace(form, read=read))
            tiles: Sequence[Tile | None] = [None]
            if read in TILED:
                columns = twin.read.maps.values.shape[1] // (2 if gated else 1)
                tiles = candidates(self.tokens, columns, gated)
            for tile in tiles:
                made = replace(form, read=read, read_tile=tile)
                action = partial(twin.read, x, gated, tile)
                if expected is None or works(partial(check_agrees, action, expected)):
                    yield label(read, tile), (made, action)

    def _writes(self, name: str, part: Reader, form: Form) -> Iterator[Choice]:
        if isinstance(part, Classifier):
            return
        x = self._stream()
        for write in write_forms(self.gpu, self.kernels):
            twin = self._folded(name, replace(form, write=write))
            assert not isinstance(twin, Classifier)
            inner = twin.write.maps.values.shape[0]
            h = self._random(self.tokens, inner)
            tiles: Sequence[Tile | None] = [None]
            if write == "fused":
                tiles = candidates(self.tokens, len(twin.write.sites))
            for tile in tiles:
                made = replace(form, write=write, write_tile=tile)
                yield label(write, tile), (made, partial(twin.write, x, h, tile))

    def _steps(self, name: str, part: Reader, form: Form) -> Iterator[Choice]:
        """An operator of a decoding step: the parts that were chosen, or one kernel."""
        few = self.length == 1 and self.batch <= WHOLE
        if not self.kernels or not few or isinstance(part, Classifier):
            return
        x = self._stream()
        for step in (form, Form("fused", "fused", "narrow", step="whole")):
            twin = self._folded(name, step)
            if isinstance(twin, Mlp):
                yield step.step, (step, partial(twin, x))
            elif isinstance(twin, Attention) and self.plain.generates:
                yield step.step, (step, partial(twin.step, x, *self._context(twin)))

    def _mlps(self, name: str, part: Reader, form: Form) -> Iterator[Choice]:
        """An MLP of many tokens: the parts that were chosen, or one kernel that agrees."""
        x = self._stream()
        if not self.kernels or not isinstance(part, Mlp) or not part.joins(x):
            return
        yield "parts", (form, partial(self._folded(name, form), x))
        expected = part(x.clone())
        for tile in joined_candidates(len(part.read.sites), len(part.write.sites), x.itemsize):
            made = Form("fused", "fused", joined=tile)
            twin = self._folded(name, made)

            def on_copy(twin: Reader = twin) -> Tensor:  # it adds to the stream in place
                return twin(x.clone())

            if works(partial(check_agrees, on_copy, expected)):
                yield label("joined", tile), (made, partial(twin, x))

    def _folded(self, name: str, form: Form) -> Reader:
        return fold(self.model, name, self.plain.folding, form).to(self.device)

    def _stream(self) -> Tensor:
        if self.order == "tokens":
            return self._random(self.tokens, self.plain.width)
        return self._random(self.plain.width, self.tokens).T

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device).to(self.plain.dtype)


def _served(model: InferenceModel, inputs: Tensor) -> Callable[[], object]:
    """What tuning is for: a pass over the inputs, or a step after a long context."""
    if inputs.shape[1] > 1 or not model.generates:
        return partial(model, inputs)
    cache = model.new_cache(len(inputs))

    def step() -> None:
        cache.hold_(cache.length - 1)
        model.decode(inputs[:, 0], cache, static=inputs.is_cuda)

    return step


def _sizes(part: Reader) -> Hashable:
    """What the time of an operator depends on: parts of equal sizes are timed once."""
    ends = [each for each in part.modules() if isinstance(each, Read | Write)]
    sizes = [(*each.maps.values.shape, len(each.sites), each.stop - each.start) for each in ends]
    heads = (part.heads, part.groups, part.window) if isinstance(part, Attention) else ()
    return (type(part), *sizes, *heads)


def _fastest_pass(model: InferenceModel, inputs: Tensor, repeats: int) -> int | None:
    """All sequences at once, or one by one: then activations stay in a core's cache."""

    def serve(tokens: int | None) -> None:
        model.tokens_per_pass = tokens
        model(inputs)

    options = (None, inputs.shape[1])
    return fastest(call_times({each: partial(serve, each) for each in options}, repeats))[0]
