"""The operations of the inference form, each alone, at any sizes, as they are served.

Reads, writes, heads and embeddings are the parts of `gaugelasso.inference` itself on random
values, in the forms and tiles that `tuned` chooses from.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from gaugelasso.inference import InferenceModel
from gaugelasso.inference.candidates import TILED, attention_forms, label, read_forms, write_forms
from gaugelasso.inference.folding import Folding, StreamOrder
from gaugelasso.inference.heads import Attention
from gaugelasso.inference.norms import Norm
from gaugelasso.inference.stream import Read, Write, statistics_dtype
from gaugelasso.kernels.dispatch import ALIGN, available
from gaugelasso.kernels.tiles import Tile, candidates
from gaugelasso.models import AttentionSpec, Transformer, TransformerSpec
from gaugelasso.models.centred_norm import CentredNorm

Action = Callable[[], object]
Actions = Mapping[str, Action]


@dataclass(frozen=True)
class Setting:
    """What is served: `batch` sequences in a pass, on a device, in a precision.

    `new` are the tokens of each sequence that a pass reads: all, or one if it decodes.
    """

    spec: TransformerSpec
    device: torch.device
    dtype: torch.dtype
    batch: int
    length: int
    decode: bool
    align: int
    order: StreamOrder

    @property
    def new(self) -> int:
        return 1 if self.decode else self.length

    @property
    def tokens(self) -> int:
        return self.batch * self.new

    @property
    def kernels(self) -> bool:
        """Whether there are fused forms."""
        return self.device.type == "cuda" and available() and self.dtype is not torch.float64

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device).to(self.dtype)

    def stream(self, width: int) -> Tensor:
        if self.order == "tokens":
            return self.random(self.tokens, width)
        return self.random(width, self.tokens).T

    def padded(self, width: int) -> int:
        return -(-width // self.align) * self.align


def actions(setting: Setting, kind: str, fixed: tuple[int, ...], sizes: tuple[int, ...]) -> Actions:
    """The forms of an operation of these sizes, as functions to be timed."""
    return _KINDS[kind](setting, fixed, sizes)


def unit(setting: Setting, kind: str) -> int:
    """The multiple that the inference form pads the sizes of an operation to."""
    return min(setting.align, ALIGN) if kind == "attention" else setting.align


def _read(setting: Setting, fixed: tuple[int, ...], sizes: tuple[int, ...]) -> Actions:
    return _reading(setting, sizes[0], setting.padded(sizes[1]), gated=False)


def _gated_read(setting: Setting, fixed: tuple[int, ...], sizes: tuple[int, ...]) -> Actions:
    return _reading(setting, sizes[0], 2 * setting.padded(sizes[1]), gated=True)


def _gelu_read(setting: Setting, fixed: tuple[int, ...], sizes: tuple[int, ...]) -> Actions:
    columns = setting.padded(sizes[1])
    bias = setting.random(columns)
    reads = _reading(setting, sizes[0], columns, gated=False)

    def activated(read: Action) -> Action:
        return lambda: F.gelu(cast(Tensor, read()) + bias)

    return {name: activated(read) for name, read in reads.items()}


def _reading(setting: Setting, rows: int, columns: int, gated: bool) -> Actions:
    x = setting.stream(setting.padded(len(setting.spec.sites)))
    weight = torch.full((rows,), 1 / rows, dtype=statistics_dtype(setting.dtype))
    maps = torch.randn(rows, columns).to(setting.dtype)
    made: dict[str, Action] = {}
    for form in read_forms(setting.kernels, setting.order, setting.tokens, gated):
        part = Read(_sites(rows, x.shape[1]), weight, maps, form, False, setting.align)
        tiles: Sequence[Tile | None] = [None]
        if form in TILED:
            tiles = candidates(setting.tokens, columns // (2 if gated else 1), gated)
        for tile in tiles:
            made[label(form, tile)] = partial(part.to(setting.device), x, gated, tile)
    return made


def _write(setting: Setting, fixed: tuple[int, ...], sizes: tuple[int, ...]) -> Actions:
    x = setting.stream(setting.padded(len(setting.spec.sites)))
    h = setting.random(setting.tokens, sizes[0])
    # Small: what is written is added up in place, call by call.
    maps = (1e-3 * torch.randn(sizes[0], sizes[1])).to(setting.dtype)
    sites, width = _sites(sizes[1], x.shape[1]), x.shape[1]
    made: dict[str, Action] = {}
    for form in write_forms(setting.device.type == "cuda", setting.kernels):
        part = Write(sites, maps, width, form, False, setting.align)
        tiles: Sequence[Tile | None] = [None]
        if form == "fused":
            tiles = candidates(setting.tokens, sizes[1])
        for tile in tiles:
            made[label(form, tile)] = partial(part.to(setting.device), x, h, tile)
    return made


def _sites(number: int, width: int) -> Tensor:
    """Sites that are spread evenly over the stream: no form gains by their places."""
    return torch.arange(number) * width // number


def _attention(setting: Setting, fixed: tuple[int, ...], sizes: tuple[int, ...]) -> Actions:
    heads, groups, rope, causal, *window = fixed
    keys, values = sizes[0] // (2 if rope else 1), sizes[1]
    angles = tuple(1.0 / (1 + i) for i in range(keys)) if rope else None
    operator = AttentionSpec(0, (0,), (0,), heads, groups, keys, values, 1.0, angles)
    if window:
        operator = replace(operator, window=window[0])
    spec = replace(
        setting.spec, sites=(0,), embed=(0,), classify=(0,), operators=(operator,), positions=False,
        causal=bool(causal), length=max(setting.length, 1), layers=1, tied_head=False,
        tied_mean=False,
    )  # fmt: skip
    model = Transformer(spec).to(setting.device)
    made: dict[str, Action] = {}
    gpu = setting.device.type == "cuda"
    for form in attention_forms(gpu, setting.kernels, setting.new):
        options: dict[str, Any] = {"dtype": setting.dtype, "align": setting.align}
        served = InferenceModel(model, forms=form, **options)
        part = served.operators["attention_0"]
        assert isinstance(part, Attention)
        # Of the read only the number of columns counts: its product is an operation of its own.
        rows = setting.random(setting.tokens, part.read.maps.values.shape[1])
        name = label(form.attention, form.attention_tile)
        if setting.decode:
            made[name] = _decoding(setting, served, part, rows)
        else:
            made[name] = partial(part.mix, rows, setting.batch, causal=served.spec.causal)
    return made


def _decoding(setting: Setting, served: InferenceModel, part: Attention, rows: Tensor) -> Action:
    cache = served.new_cache(setting.batch, setting.length)
    cache.hold_(setting.length - 1)  # the last token that fits
    at = cache.new_tokens(static=setting.device.type == "cuda")
    return partial(part.mix_one, rows, cache.rows(0), at)


def _embed(setting: Setting, fixed: tuple[int, ...], sizes: tuple[int, ...]) -> Actions:
    sites = tuple(range(sizes[0]))
    # A tied table is looked up in the same way; its factors take no time.
    plain = replace(setting.spec, tied_head=False, tied_mean=False)
    spec = replace(plain, sites=sites, embed=sites, classify=(0,), operators=())
    model = Transformer(spec).to(setting.device)
    served = InferenceModel(
        model, dtype=setting.dtype, align=setting.align, stream=setting.order, reorder=False
    )
    shape = (setting.batch, setting.new)
    inputs, tokens = torch.zeros(shape, dtype=torch.long, device=setting.device), fixed[1]
    at = None
    if setting.decode:
        at = torch.full(shape, setting.length - 1, dtype=torch.long, device=setting.device)
    if not tokens:
        inputs = setting.random(*shape, model.embedding.table.shape[0])
    return {"embed": partial(served.embedding, inputs, at)}


def _norm(setting: Setting, fixed: tuple[int, ...], sizes: tuple[int, ...]) -> Actions:
    folding = Folding(torch.arange(sizes[0]), setting.dtype, align=setting.align)
    part = Norm(CentredNorm(sizes[0], eps=0.0, by_token=False), folding).to(setting.device)
    return {"norm": partial(part, setting.stream(setting.padded(sizes[0])))}


_KINDS: Mapping[str, Callable[[Setting, tuple[int, ...], tuple[int, ...]], Actions]] = {
    "read": _read,
    "gated read": _gated_read,
    "gelu read": _gelu_read,
    "write": _write,
    "attention": _attention,
    "embed": _embed,
    "norm": _norm,
}
