"""The parts of a model in all of their forms, timed on the device of the model.

Every read, write and attention is timed alone, on random values of the sizes that it will see; on a
GPU as a CUDA graph, because launches would hide the differences. All forms compute the same, which
is checked for the kernels that read, for attention of whole sequences and for whole MLPs.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from gaugelasso.inference.attention import ROWS
from gaugelasso.inference.cache import Cache, CacheRows, NewTokens
from gaugelasso.inference.candidates import TILED, attention_forms, label, read_forms, write_forms
from gaugelasso.inference.clocks import fastest, times_on
from gaugelasso.inference.folded import fold
from gaugelasso.inference.folding import WHOLE, Form, StreamOrder
from gaugelasso.inference.model import InferenceModel
from gaugelasso.inference.operators import Attention, Classifier, Mlp, Reader
from gaugelasso.inference.stream import Read, Write
from gaugelasso.inference.usable import check_agrees, works
from gaugelasso.kernels.dispatch import available, reference_kernels
from gaugelasso.kernels.tiles import Tile, candidates, joined_candidates
from gaugelasso.models import Transformer

# Seconds by part (read, write, attention; step, mlp: an operator at once) and form.
Timings = dict[str, dict[str, float]]
# What a form is called, the form, and an action that uses it.
Choice = tuple[str, tuple[Form, Callable[[], object]]]


class Parts:
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
                choices = {
                    each: way for each, way in choices.items() if works(way[1], f"{name}: {each}")
                }
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
        """Of whole sequences, those whose kernels agree with their references."""
        if not isinstance(part, Attention):
            return
        for each in attention_forms(self.gpu, self.kernels, self.length):
            twin = self._folded(name, each)
            assert isinstance(twin, Attention)
            rows = self._random(self.tokens, twin.read.maps.values.shape[1])
            rows *= twin.d_k**-0.25  # scores of a spread of one: larger ones multiply rounding
            if self.length == 1 and self.plain.generates:
                action = partial(twin.mix_one, rows, *self._context(twin))
            else:
                action = partial(twin.mix, rows, self.batch, causal=self.plain.spec.causal)
                check = partial(self._check_mix, twin, rows)
                if each.attention in ROWS and not works(check, f"{name}: {each}"):
                    continue
            yield label(each.attention, each.attention_tile), (each, action)

    def _check_mix(self, twin: Attention, rows: Tensor) -> None:
        def mix() -> Tensor:  # which may change the rows
            return twin.mix(rows.clone(), self.batch, causal=self.plain.spec.causal)

        with reference_kernels():
            expected = mix()
        check_agrees(mix, expected)

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
                columns = twin.read.maps.values.shape[1]
                if gated and not twin.read.paired:
                    tiles = candidates(self.tokens, columns // 2, gated)
                else:
                    tiles = candidates(self.tokens, columns)
            for tile in tiles:
                made = replace(form, read=read, read_tile=tile)
                action = partial(twin.read, x, gated, tile)
                if expected is not None:
                    check = partial(check_agrees, action, expected)
                    if not works(check, f"{name}: {made}"):
                        continue
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

            if works(partial(check_agrees, on_copy, expected), f"{name}: {made}"):
                yield label("joined", tile), (made, partial(twin, x))

    def _folded(self, name: str, form: Form) -> Reader:
        return fold(self.model, name, self.plain.folding, form).to(self.device)

    def _stream(self) -> Tensor:
        if self.order == "tokens":
            return self._random(self.tokens, self.plain.width)
        return self._random(self.plain.width, self.tokens).T

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device).to(self.plain.dtype)


def _sizes(part: Reader) -> Hashable:
    """What the time of an operator depends on: parts of equal sizes are timed once."""
    ends = [each for each in part.modules() if isinstance(each, Read | Write)]
    sizes = [
        (*each.maps.values.shape, len(each.sites), each.stop - each.start, each.first is None)
        for each in ends
    ]
    heads = (part.heads, part.groups, part.window) if isinstance(part, Attention) else ()
    return (type(part), *sizes, *heads)
