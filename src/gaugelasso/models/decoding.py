"""Decoding: a causal transformer one position at a time, with a key/value cache.

Widths differ between layers, so the cache has another shape in every layer. Works on tokens,
not on text.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from gaugelasso import kernels
from gaugelasso.models.json_fields import SpecError
from gaugelasso.models.operators import Attention, Operator
from gaugelasso.models.transformer import Transformer


class Decoder:
    """Feed the prompt [B, T] first, then tokens [B, 1], one position at a time.

    The model must be in eval mode. Its weights must not change: the cache depends on them.
    """

    def __init__(self, model: Transformer):
        spec = model.initial_spec
        if spec.input_kind != "tokens" or not spec.causal:
            reads = "whole sequences" if spec.input_kind == "tokens" else "patches"
            raise SpecError(
                f"this model reads {reads} and cannot generate tokens; decoding needs a causal "
                "model over tokens"
            )
        self.model = model
        self.length = spec.length
        self.position = 0
        self._cache: dict[str, tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def feed(self, tokens: Tensor) -> Tensor:
        """Logits [B, T, outputs] of the fed positions, given all positions fed before."""
        batch, count = tokens.shape
        start, end = self.position, self.position + count
        if end > self.length:
            raise SpecError(
                f"position {end} is beyond the model's length of {self.length}; start a new "
                "Decoder with fewer tokens"
            )
        if start and count > 1:
            raise SpecError(f"got {count} positions; after the first feed, give one at a time")
        # Fused kernels are made for thousands of positions and are not faster for one.
        with kernels.reference_kernels():
            x = self._embed(tokens, start, end)
            for name, operator in self.model.operators.items():
                assert isinstance(operator, Operator)
                if isinstance(operator, Attention):
                    x = self._attend(name, operator, x, batch, start)
                else:
                    x = operator(x, batch)
            logits = self.model.classifier(x)
        self.position = end
        return logits.view(batch, count, -1)

    def _embed(self, tokens: Tensor, start: int, end: int) -> Tensor:
        embedding = self.model.embedding
        positions = None if embedding.positions is None else embedding.positions[start:end]
        scale, sites = embedding.write.scale, embedding.write.sites
        size = len(self.model.sites)
        return kernels.embed(tokens, embedding.table, positions, scale, sites, size)

    def _attend(self, name: str, operator: Attention, x: Tensor, batch: int, start: int) -> Tensor:
        x, q, *new = operator.project_qkv(x, batch, start)
        if start:
            new = [torch.cat(pair, dim=2) for pair in zip(self._cache[name], new, strict=True)]
        k, v = self._cache[name] = (new[0], new[1])
        # A single last position sees all keys of its window; only the first feed needs a mask.
        window = operator.window
        if start and window is not None:
            k, v, window = k[:, :, -window:], v[:, :, -window:], None
        mixed = kernels.attend(q, k, v, operator.softmax_scale, start == 0, window)
        return operator.project_out(x, mixed)


def sample(
    model: Transformer,
    prompt: Sequence[int],
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    generator: torch.Generator | None = None,
) -> Iterator[int]:
    """An endless iterator of tokens that continue the prompt.

    Each is drawn from softmax(logits / temperature), restricted to the `top_k` likeliest if
    that is not 0; at temperature 0 it is the likeliest. When the model's length is reached, its
    last half is fed again from position 0, and decoding continues from there.
    """
    if not prompt:
        raise SpecError("the prompt is empty; give at least one token")
    if not temperature >= 0:
        raise SpecError(f"temperature = {temperature}: must be 0 or more")
    decoder = Decoder(model)

    def draw(logits: Tensor) -> int:
        return _draw(logits, temperature, top_k, generator)

    return _continue(decoder, list(prompt), draw)


def _continue(decoder: Decoder, text: list[int], draw: Callable[[Tensor], int]) -> Iterator[int]:
    device = decoder.model.sites.device
    half = max(1, decoder.length // 2)
    new = text if len(text) <= decoder.length else text[-half:]
    while True:
        logits = decoder.feed(torch.tensor([new], device=device))[0, -1]
        text.append(draw(logits.float()))
        yield text[-1]
        new = text[-1:]
        if decoder.position == decoder.length:
            decoder = Decoder(decoder.model)
            new = text[-half:]


def _draw(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator | None) -> int:
    if temperature == 0:
        return int(logits.argmax())
    if 0 < top_k < len(logits):
        least = logits.topk(top_k).values[-1]
        logits = logits.masked_fill(logits < least, -torch.inf)
    # The largest is subtracted first, so that a temperature close to 0 does not overflow.
    probabilities = ((logits - logits.max()) / temperature).softmax(0)
    return int(torch.multinomial(probabilities, 1, generator=generator))
