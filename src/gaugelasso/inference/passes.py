"""Passes over the folded parts: whole sequences, and new tokens with a cache.

`forward` and `forward_past` have no control flow that depends on values, so that they can be
traced.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from gaugelasso.inference.cache import Cache, NewTokens
from gaugelasso.inference.checks import (
    check_count,
    check_inputs,
    check_lengths,
    check_new_tokens,
    check_prompts,
)
from gaugelasso.inference.folded import FoldedModel
from gaugelasso.inference.operators import Attention
from gaugelasso.inference.padding import Side, rolled
from gaugelasso.inference.products import without_onednn
from gaugelasso.inference.stream import uses_kernels

Past = Sequence[tuple[Tensor, Tensor]]


class PassModel(FoldedModel):
    """A folded model that can be called; `InferenceModel` adds faster forms of the same."""

    # Tokens of one pass, for a device that is faster if activations stay in its cache.
    tokens_per_pass: int | None = None
    # Whether products may use oneDNN, which on some CPUs is slower than BLAS.
    onednn = True

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
        check_inputs(self.spec, inputs)
        check_lengths(inputs, lengths, padding)
        if lengths is not None and padding == "left":
            logits = self(rolled(inputs, lengths, 1), lengths, last=last)
            return logits if last else rolled(logits, lengths, -1)
        with self._products():
            pieces = [
                self._whole(inputs[rows], None if lengths is None else lengths[rows], last)
                for rows in self._passes(inputs)
            ]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _whole(
        self,
        inputs: Tensor,
        lengths: Tensor | None,
        last: bool,
        cache: Cache | None = None,
        rows: Tensor | slice | None = None,
    ) -> Tensor:
        """As `forward`, padded on the right. Keys and values go to these rows of a cache."""
        batch, length = inputs.shape[:2]
        mask = None
        if lengths is not None and not self.spec.causal:
            # In a causal model padding on the right is in nobody's past.
            mask = (torch.arange(length, device=inputs.device) < lengths[:, None])[:, None, None]
        x = self.embed(inputs)
        for index, operator in self.numbered():
            if isinstance(operator, Attention):
                to = None if cache is None else cache.rows(index, rows)
                rows_of = operator.project(x)
                mixed = operator.mix(rows_of, batch, causal=self.spec.causal, mask=mask, cache=to)
                x = operator.write(x, mixed)
            else:
                x = operator(x)
        if not last:
            return self.logits(x).unflatten(0, (batch, length))
        first = torch.arange(batch, device=inputs.device) * length
        return self.logits(x[first + (length if lengths is None else lengths) - 1])

    # --- with a cache -------------------------------------------------------------------

    def new_cache(self, batch: int, length: int | None = None) -> Cache:
        """An empty cache for `batch` sequences of up to `length` tokens (default: the model's)."""
        self.check_generates()
        length = self.spec.length if length is None else length
        self.check_length(length)
        check_count("batch", batch)
        check_count("length", length)
        return Cache(self.cache_widths(), batch, length, self.dtype, self.device)

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
        check_inputs(self.spec, tokens)
        check_lengths(tokens, lengths, padding)
        batch, length = tokens.shape
        check_prompts(batch, cache.batch, rows)
        cache.check_room(length)
        if lengths is not None and padding == "left":
            tokens = rolled(tokens, lengths, 1)
        into = torch.arange(batch, device=tokens.device) if rows is None else rows
        pieces = []
        with self._products():
            for part in self._passes(tokens):
                of = None if lengths is None else lengths[part]
                to = part if rows is None else into[part]
                pieces.append(self._whole(tokens[part], of, True, cache, to))
        cache.positions[into] = length if lengths is None else lengths
        cache.longest = length if rows is None else max(length, cache.longest)
        cache.even = lengths is None and rows is None
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def decode(self, tokens: Tensor, cache: Cache, *, static: bool = False) -> Tensor:
        """Logits [B, outputs] after one more token [B] of every sequence of the cache.

        `static` reads the whole cache, so that every step has the same shapes: what a captured
        graph needs.
        """
        check_new_tokens(tokens, cache.batch)
        cache.check_room(cache.longest + 1)
        at = cache.new_tokens(static=static, kernels=uses_kernels(self.embedding.table))
        logits = self._step(tokens, cache, at)
        cache.positions += 1
        cache.longest += 1
        return logits

    def _step(self, tokens: Tensor, cache: Cache, at: NewTokens) -> Tensor:
        with self._products():
            x = self.embed(tokens[:, None], at.positions[:, None])
            for index, operator in self.numbered():
                if isinstance(operator, Attention):
                    x = operator.step(x, cache.rows(index), at)
                else:
                    x = operator(x)
            return self.logits(x)

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
        here = torch.arange(length, device=tokens.device)
        causal, own = ahead <= here[:, None], ahead == here[:, None]
        # A padded token sees itself, because a softmax of nothing is NaN.
        visible = ((causal & mask[:, None]) | own)[:, None]
        seen: dict[int | None, Tensor] = {None: visible}  # by window
        present = []
        x = self.embed(tokens, positions)
        for index, operator in self.numbered():
            if isinstance(operator, Attention):
                q, *new = operator.split(operator.project(x), batch, positions)
                new = [operator.real_keys(new[0]), new[1][..., : operator.d_v]]
                k, v = (torch.cat(pair, dim=2) for pair in zip(past[index], new, strict=True))
                present.append((k, v))
                window = operator.window
                if window is not None and window not in seen:
                    place = mask.cumsum(1)  # without padding
                    # No slice from `earlier` on: a tracer does not know how long it is.
                    own_place = place.index_select(1, earlier + here)[:, :, None]
                    seen[window] = visible & ((own_place < place[:, None] + window) | own)[:, None]
                mixed = operator.attend(operator.real_keys(q), k, v, mask=seen[window])
                x = operator.deliver(x, mixed)
            else:
                x = operator(x)
        return self.logits(x).unflatten(0, (batch, length)), present

    def empty_past(self, batch: int) -> list[tuple[Tensor, Tensor]]:
        """What `forward_past` takes as `past` for the first tokens."""
        none = Cache(self.cache_widths(), batch, 0, self.dtype, self.device)
        return list(zip(none.keys, none.values, strict=True))

    def _passes(self, inputs: Tensor) -> list[slice]:
        """The sequences of each pass."""
        batch, length = inputs.shape[:2]
        if self.tokens_per_pass is None:
            return [slice(None)]
        size = max(1, self.tokens_per_pass // length)
        return [slice(start, start + size) for start in range(0, batch, size)]

    def _products(self) -> AbstractContextManager[None]:
        return nullcontext() if self.onednn else without_onednn()
