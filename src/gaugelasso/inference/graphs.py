"""Inference as CUDA graphs: one launch for a pass over whole sequences, one for a new token.

A graph has fixed sizes, so inputs are padded to a bucket: the next powers of two of batch and
length, or a size that was reserved. A batch that decodes has a cache and a step of its own. On a
CPU the same code calls the model directly.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

import torch
from torch import Tensor

from gaugelasso.inference.checks import check_count, check_inputs, check_known, check_lengths
from gaugelasso.inference.noise import exponential_
from gaugelasso.inference.padding import Side, rolled
from gaugelasso.inference.passes import PassModel
from gaugelasso.inference.sampling import Sampling, refresh_
from gaugelasso.inference.stream import statistics_dtype, uses_kernels
from gaugelasso.kernels.cuda_graph import GraphedStep
from gaugelasso.models import SpecError

# Graphs and caches of each kind that are kept. Every one holds memory of its own.
LIMIT = 8
# In place of a token, for a sequence that has stopped.
NOTHING = -1
Kept = TypeVar("Kept")


class Captured:
    """An `InferenceModel`, called with the same arguments; results are the same.

    On a GPU the first call of a bucket runs directly, the second captures the graph. The least
    recently used of more than `limit` graphs is dropped. `gpu` (default: where the model is)
    chooses the sizes and the draws of a GPU on any device.
    """

    def __init__(self, model: PassModel, *, limit: int = LIMIT, gpu: bool | None = None):
        if limit < 1:
            raise SpecError(f"limit = {limit}: at least one graph must be kept")
        self.model, self.device = model, model.device
        self.gpu = model.device.type == "cuda" if gpu is None else gpu
        self._sizes: set[tuple[int, int]] = set()
        self._passes: _Recent[_Pass] = _Recent(limit)
        self._decoders: _Recent[Decoder] = _Recent(limit)

    def reserve(self, batch: int, length: int) -> "Captured":
        """Give this size a bucket of its own, without padding; returns itself."""
        check_count("batch", batch)
        check_count("length", length)
        self.model.check_length(length)
        self._sizes.add((batch, length))
        return self

    def bucket(self, batch: int, length: int) -> tuple[int, int]:
        """The size that such inputs are padded to."""
        if not self.gpu or (batch, length) in self._sizes:
            return batch, length
        return _power(batch), min(_power(length), self.model.spec.length)

    @torch.inference_mode()
    def __call__(
        self,
        inputs: Tensor,
        lengths: Tensor | None = None,
        *,
        padding: Side = "right",
        last: bool = False,
    ) -> Tensor:
        """As `InferenceModel.forward`."""
        if not self.gpu:
            direct: Tensor = self.model(inputs, lengths, padding=padding, last=last)
            return direct
        check_inputs(self.model.spec, inputs)
        check_lengths(inputs, lengths, padding)
        # Those on a CPU are copied to the device, which cannot check them.
        if inputs.is_cpu and self.model.spec.input_kind == "tokens":
            check_known(self.model.spec, inputs)
        batch, length = inputs.shape[:2]
        if lengths is not None and padding == "left":
            logits = self(rolled(inputs, lengths, 1), lengths, last=last)
            return logits if last else rolled(logits, lengths, -1)
        size = self.bucket(batch, length)
        # Lengths cost a mask in a model that is not causal.
        ragged = lengths is not None or (size[1] != length and (last or not self.model.spec.causal))
        shape = (*size, *inputs.shape[2:])
        key = (shape, inputs.dtype, ragged, last)
        found = self._passes.get(key, lambda: _Pass(self.model, shape, inputs.dtype, ragged, last))
        logits = found(inputs, lengths)[:batch]
        # The graph will overwrite its result.
        return (logits if last else logits[:, :length]).clone()

    @contextmanager
    def decoder(
        self, batch: int, length: int, sampling: Sampling, block: int
    ) -> Iterator["Decoder"]:
        """A decoder for exactly this size, for one text at a time; it is kept for the next."""
        key = (batch, length, sampling, block)
        taken = self._decoders.take(
            key, lambda: Decoder(self.model, batch, length, sampling, block, self.gpu)
        )
        try:
            yield taken
        finally:
            self._decoders.put(key, taken)


class _Recent(Generic[Kept]):
    """The most recently used values of a cache."""

    def __init__(self, limit: int):
        self._limit = limit
        self._kept: OrderedDict[Hashable, Kept] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], Kept]) -> Kept:
        value = self.take(key, make)
        self.put(key, value)
        return value

    def take(self, key: Hashable, make: Callable[[], Kept]) -> Kept:
        """The value, which belongs to the caller until it is put back."""
        return self._kept.pop(key) if key in self._kept else make()

    def put(self, key: Hashable, value: Kept) -> None:
        self._kept[key] = value
        self._kept.move_to_end(key)
        while len(self._kept) > self._limit:
            self._kept.popitem(last=False)

    def __len__(self) -> int:
        return len(self._kept)


class _Pass:
    """A pass over whole sequences of one bucket."""

    def __init__(
        self,
        model: PassModel,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        ragged: bool,
        last: bool,
    ):
        self._inputs = torch.zeros(shape, dtype=dtype, device=model.device)
        self._lengths = torch.ones(shape[0], dtype=torch.long, device=model.device)
        self._step = GraphedStep(self._serve, model.device.type == "cuda")
        self._model, self._ragged, self._last = model, ragged, last
        self._logits: Tensor | None = None

    def _serve(self) -> None:
        lengths = self._lengths if self._ragged else None
        self._logits = self._model(self._inputs, lengths, last=self._last)

    def __call__(self, inputs: Tensor, lengths: Tensor | None) -> Tensor:
        batch, length = inputs.shape[:2]
        self._inputs[:batch, :length] = inputs
        if lengths is None:
            self._lengths[:batch].fill_(length)
        else:
            self._lengths[:batch] = lengths
        self._step()
        assert self._logits is not None
        return self._logits


class Decoder:
    """A batch that decodes: its cache, what it draws, and its step as a graph.

    `cache.longest` is the caller's to keep: a captured step does not run the model's own code.
    With `gpu`, every step has the same shapes and draws are of `noise`; else they are those of one
    `torch.Generator` per sequence. Outputs that are no tokens of the model are not drawn.
    """

    def __init__(
        self,
        model: PassModel,
        batch: int,
        length: int,
        sampling: Sampling,
        block: int,
        gpu: bool,
    ):
        device = model.device
        self.model, self.sampling, self.gpu = model, sampling, gpu
        self.cache = model.new_cache(batch, length)
        self.drawn = torch.zeros(batch, dtype=torch.long, device=device)
        self.stopped = torch.zeros(batch, dtype=torch.bool, device=device)
        self.out = torch.zeros(batch, block, dtype=torch.long, device=device)
        self._at = torch.zeros(1, dtype=torch.long, device=device)
        tokens = min(model.spec.inputs, model.spec.outputs)
        self._stops = torch.zeros(tokens, dtype=torch.bool, device=device)
        self._seeds = torch.zeros(batch, dtype=torch.long, device=device)
        self._counts = torch.zeros(batch, dtype=torch.long, device=device)
        self._generators: Sequence[torch.Generator] = ()
        precision = statistics_dtype(model.dtype)
        self._noise = torch.ones(batch, tokens, dtype=precision, device=device)
        self._prompts: dict[int, tuple[Tensor, Tensor, GraphedStep]] = {}
        self._graph = device.type == "cuda"
        self._step = GraphedStep(self._advance, self._graph)

    def begin_(self, seeds: Sequence[int], stop: Sequence[int], real: int) -> None:
        """Begin another text: of all sequences the first `real` ones are wanted."""
        known = [token for token in stop if 0 <= token < len(self._stops)]
        stops = torch.zeros(len(self._stops), dtype=torch.bool)
        stops[torch.tensor(known, dtype=torch.long)] = True
        self._stops.copy_(stops)
        self.stopped.zero_()
        self.stopped[real:] = True
        self._at.zero_()
        self._counts.zero_()
        # Seeds of 64 bits, as signed numbers.
        self._seeds.copy_(torch.tensor([(seed + 2**63) % 2**64 - 2**63 for seed in seeds]))
        if not self.gpu:
            device = self.model.device
            self._generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]

    def prefill(self, tokens: Tensor, lengths: Tensor) -> None:
        """Read the prompts [B, S], padded on the right, and draw the first tokens."""
        size = tokens.shape[1]
        if self.gpu:
            size = min(_power(size), self.cache.length)
        if size not in self._prompts:
            self._prompts[size] = self._new_prompt(size)
        prompts, counts, step = self._prompts[size]
        prompts[:, : tokens.shape[1]] = tokens
        counts.copy_(lengths)
        step()

    def step(self) -> None:
        """Read the tokens that were drawn last, and draw the next."""
        self._step()

    def rewind_(self) -> None:
        """`out` was read: the next token goes to its first column."""
        self._at.zero_()

    def _new_prompt(self, size: int) -> tuple[Tensor, Tensor, GraphedStep]:
        prompts = self.drawn.new_zeros(len(self.drawn), size)
        counts = torch.ones_like(self.drawn)

        def read() -> None:
            self._draw(self.model.prefill(prompts, self.cache, counts))

        return prompts, counts, GraphedStep(read, self._graph)

    def _advance(self) -> None:
        self._draw(self.model.decode(self.drawn, self.cache, static=self.gpu))

    def _draw(self, logits: Tensor) -> None:
        if not self.sampling.greedy:
            if self.gpu:
                exponential_(self._noise, self._seeds, self._counts)
            else:
                refresh_(self._noise, self._generators)
        logits = logits[:, : self._noise.shape[1]].to(self._noise.dtype)
        drawn = self.sampling.draw(logits, self._noise)
        if uses_kernels(drawn):
            from gaugelasso.kernels.gpu import ends

            ends.note_drawn_(
                drawn, self.drawn, self.stopped, self._stops, self.out, self._at, self._counts,
                NOTHING,
            )  # fmt: skip
            return
        shown = torch.where(self.stopped, NOTHING, drawn)
        self.out.index_copy_(1, self._at, shown[:, None])
        self.drawn.copy_(drawn)
        self.stopped |= self._stops[drawn]
        self._at += 1
        self._counts += 1


def _power(size: int) -> int:
    """The next power of two."""
    return 1 << max(0, size - 1).bit_length()
