"""The inference form of a trained transformer: what serving needs, and nothing else.

Gains and scales are folded into the maps, the sites are reordered so that reads are nearly
contiguous, and all tensors are buffers of one precision. Plain PyTorch. `forward` and
`forward_past` have no control flow that depends on values, so that they can be traced.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from gaugelasso.inference.cache import Cache
from gaugelasso.inference.layout import inverse, site_order
from gaugelasso.inference.operators import (
    Attention,
    Classifier,
    Embedding,
    Folding,
    Form,
    Mlp,
    Reader,
)
from gaugelasso.inference.padding import Side, rolled
from gaugelasso.inference.products import without_onednn
from gaugelasso.models import SpecError, Transformer, operators

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
Past = Sequence[tuple[Tensor, Tensor]]


class InferenceModel(nn.Module):
    """Build with `InferenceModel(model)`; call on [B, S] tokens or [B, S, n] patches.

    `forms` says how each operator reads, writes and attends, by its name or for all;
    `tuned` measures which are fastest. With `int8` the maps are stored in eight bits, a quarter of
    the memory; `compare` says what that costs. The trained model is not changed.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        dtype: torch.dtype = torch.float32,
        forms: Form | Mapping[str, Form] | None = None,
        int8: bool = False,
        reorder: bool = True,
    ):
        super().__init__()
        if dtype not in DTYPES:
            raise SpecError(f"dtype = {dtype}: give {', '.join(map(str, DTYPES))}")
        self.spec = model.spec()
        self.forms = forms if isinstance(forms, Mapping) else _for_all(model, forms or Form())
        size = len(self.spec.sites)
        order = site_order(self.spec) if reorder else torch.arange(size)
        folding = Folding(inverse(order), dtype, int8)
        self.order: list[int] = order.tolist()
        self.embedding = Embedding(model.embedding, folding)
        self.operators = nn.ModuleDict()
        for name, part in model.operators.items():
            if isinstance(part, operators.Attention):
                made: nn.Module = Attention(part, folding, self.forms[name], self.spec.length)
            else:
                assert isinstance(part, operators.SwiGLU)
                made = Mlp(part, folding, self.forms[name])
            self.operators[name] = made
        self.classifier = Classifier(model.classifier, folding, self.forms["classifier"])
        # Tokens of one pass, for a device that is faster if activations stay in its cache.
        self.tokens_per_pass: int | None = None
        # Whether products may use oneDNN, which on some CPUs is slower than BLAS.
        self.onednn = True
        self.eval()
        self.to(model.sites.device)

    # --- whole sequences ----------------------------------------------------------------

    def forward(
        self,
        inputs: Tensor,
        lengths: Tensor | None = None,
        *,
        padding: Side = "right",
        last: bool = False,
    ) -> Tensor:
        """Logits (or pixels) [B, S, outputs], or [B, outputs] of the last position of each.

        With `lengths` [B] the sequences are padded on the given side with any values. Outputs of
        padded positions mean nothing.
        """
        self.check_length(inputs.shape[1])
        if lengths is not None and padding == "left":
            logits = self(rolled(inputs, lengths, 1), lengths, last=last)
            return logits if last else rolled(logits, lengths, -1)
        with self._products():
            pieces = [
                self._whole(inputs[rows], None if lengths is None else lengths[rows], last, None)
                for rows in self._passes(inputs)
            ]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _whole(
        self,
        inputs: Tensor,
        lengths: Tensor | None,
        last: bool,
        store: Callable[[int, Tensor, Tensor], None] | None,
    ) -> Tensor:
        batch, length = inputs.shape[:2]
        mask = None
        if lengths is not None and not self.spec.causal:
            # In a causal model padding on the right is in nobody's past.
            mask = (torch.arange(length, device=inputs.device) < lengths[:, None])[:, None, None]
        x = self.embedding(inputs)
        for index, operator in self._numbered():
            if isinstance(operator, Attention):
                q, k, v = operator.project(x, batch)
                if store:
                    store(index, k, v)
                mixed = operator.attend(q, k, v, causal=self.spec.causal, mask=mask)
                x = operator.deliver(x, mixed)
            else:
                x = operator(x)
        if not last:
            return self.classifier(x).unflatten(0, (batch, length))
        first = torch.arange(batch, device=inputs.device) * length
        return self.classifier(x[first + (length if lengths is None else lengths) - 1])

    # --- with a cache -------------------------------------------------------------------

    def new_cache(self, batch: int, length: int | None = None) -> Cache:
        """An empty cache for `batch` sequences of up to `length` tokens (default: the model's)."""
        self.check_generates()
        length = self.spec.length if length is None else length
        self.check_length(length)
        return Cache(self._cache_widths(), batch, length, self.dtype, self.device)

    @property
    def cache_bytes_per_token(self) -> int:
        """Memory of the keys and values of one token of one sequence."""
        numbers = sum(groups * (d_k + d_v) for groups, d_k, d_v in self._cache_widths())
        return numbers * self.dtype.itemsize

    def prefill(
        self,
        tokens: Tensor,
        cache: Cache,
        lengths: Tensor | None = None,
        *,
        padding: Side = "right",
        rows: Tensor | None = None,
    ) -> Tensor:
        """Logits [B, outputs] after the prompts [B, S], which fill the cache from position 0.

        Lengths and padding as in `forward`. `rows` [B] are the sequences of the cache to fill;
        without them, all of its sequences.
        """
        batch, length = tokens.shape
        self.check_length(length)
        cache.check_room(length)
        if lengths is not None and padding == "left":
            tokens = rolled(tokens, lengths, 1)
        into = torch.arange(batch, device=tokens.device) if rows is None else rows
        pieces = []
        with self._products():
            for part in self._passes(tokens):
                store = partial(cache.fill_, part if rows is None else into[part])
                of = None if lengths is None else lengths[part]
                pieces.append(self._whole(tokens[part], of, True, store))
        cache.positions[into] = length if lengths is None else lengths
        cache.longest = length if rows is None else max(length, cache.longest)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def decode(self, tokens: Tensor, cache: Cache, *, static: bool = False) -> Tensor:
        """Logits [B, outputs] after one more token [B] of every sequence of the cache.

        `static` reads the whole cache, so that every step has the same shapes: what a captured
        graph needs.
        """
        cache.check_room(cache.longest + 1)
        cache.longest += 1
        seen = cache.length if static else cache.longest
        at = cache.positions[:, None]
        mask = (torch.arange(seen, device=tokens.device) <= at)[:, None, None]
        with self._products():
            x = self.embedding(tokens[:, None], at)
            for index, operator in self._numbered():
                if isinstance(operator, Attention):
                    q, k, v = operator.project(x, len(tokens), at)
                    cache.append_(index, k, v)
                    k, v = cache.keys[index][:, :, :seen], cache.values[index][:, :, :seen]
                    x = operator.deliver(x, operator.attend(q, k, v, mask=mask))
                else:
                    x = operator(x)
            logits = self.classifier(x)
        cache.positions += 1
        return logits

    def forward_past(
        self, tokens: Tensor, positions: Tensor, mask: Tensor, past: Past
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Logits [B, S, outputs] of tokens after `past`, and past and tokens together.

        The form for exports, which changes nothing in place. `past` holds keys [B, G, T, d_k] and
        values [B, G, T, d_v] of every attention operator; T may be 0. `positions` [B, S] are those
        of the tokens. `mask` [B, T + S] is True for what is not padding, on whichever side. Every
        token sees what is not padding up to itself.
        """
        batch, length = tokens.shape
        earlier = mask.shape[1] - length
        ahead = torch.arange(mask.shape[1], device=tokens.device) - earlier
        causal = ahead <= torch.arange(length, device=tokens.device)[:, None]
        own = ahead == torch.arange(length, device=tokens.device)[:, None]
        # A padded token sees itself, because a softmax of nothing is NaN.
        visible = ((causal & mask[:, None]) | own)[:, None]
        present = []
        x = self.embedding(tokens, positions)
        for index, operator in self._numbered():
            if isinstance(operator, Attention):
                q, *new = operator.project(x, batch, positions)
                k, v = (torch.cat(pair, dim=2) for pair in zip(past[index], new, strict=True))
                present.append((k, v))
                x = operator.deliver(x, operator.attend(q, k, v, mask=visible))
            else:
                x = operator(x)
        return self.classifier(x).unflatten(0, (batch, length)), present

    def empty_past(self, batch: int) -> list[tuple[Tensor, Tensor]]:
        """What `forward_past` takes as `past` for the first tokens."""
        none = Cache(self._cache_widths(), batch, 0, self.dtype, self.device)
        return list(zip(none.keys, none.values, strict=True))

    # --- what it is ---------------------------------------------------------------------

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.table.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.table.device

    @property
    def weight_bytes(self) -> int:
        """Memory of all tensors."""
        return sum(each.numel() * each.element_size() for each in self.buffers())

    @property
    def generates(self) -> bool:
        """Whether this is a causal model over tokens."""
        return self.spec.input_kind == "tokens" and self.spec.causal

    def readers(self) -> dict[str, Reader]:
        """The operators by name, and the classifier."""
        parts = [*self.operators.items(), ("classifier", self.classifier)]
        return {name: part for name, part in parts if isinstance(part, Reader)}

    def check_length(self, length: int) -> None:
        """SpecError if a sequence is longer than the model."""
        if length > self.spec.length:
            raise SpecError(
                f"a sequence of {length} positions is longer than the model's {self.spec.length}; "
                "shorten it"
            )

    def check_generates(self) -> None:
        """SpecError if this is no causal model over tokens."""
        if not self.generates:
            reads = "whole sequences" if self.spec.input_kind == "tokens" else "patches"
            raise SpecError(
                f"this model reads {reads} and cannot generate tokens; decoding needs a causal "
                "model over tokens"
            )

    def _cache_widths(self) -> list[tuple[int, int, int]]:
        parts = (part for part in self.operators.values() if isinstance(part, Attention))
        return [(part.groups, part.d_k, part.d_v) for part in parts]

    def _numbered(self) -> Iterator[tuple[int, nn.Module]]:
        """The operators, each with the number of attention operators before it."""
        number = 0
        for part in self.operators.values():
            yield number, part
            number += isinstance(part, Attention)

    def _passes(self, inputs: Tensor) -> list[slice]:
        """The sequences of each pass."""
        batch, length = inputs.shape[:2]
        if self.tokens_per_pass is None:
            return [slice(None)]
        size = max(1, self.tokens_per_pass // length)
        return [slice(start, start + size) for start in range(0, batch, size)]

    def _products(self) -> AbstractContextManager[None]:
        return nullcontext() if self.onednn else without_onednn()


def _for_all(model: Transformer, form: Form) -> dict[str, Form]:
    return dict.fromkeys([*model.operators, "classifier"], form)
