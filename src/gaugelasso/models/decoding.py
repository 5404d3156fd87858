"""Decoding: a causal transformer one position at a time, remembering keys and values.

Every layer keeps its own widths, so every layer's memory has its own shape. Knows nothing
of text: tokens in, tokens out.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from gaugelasso import kernels
from gaugelasso.models.operators import Attention, Operator
from gaugelasso.models.spec import SpecError
from gaugelasso.models.transformer import Transformer


class Decoder:
    """Feed tokens [B, T], all that is known at first, then one position at a time.

    The model must be in eval mode, and stay as it is: what is remembered is of its weights.
    """

    def __init__(self, model: Transformer):
        spec = model.initial_spec
        if spec.input_kind != "tokens" or not spec.causal:
            takes = "sequences as a whole" if spec.input_kind == "tokens" else "patches"
            raise SpecError(f"this model reads {takes}: only causal ones over tokens can go on")
        self.model = model
        self.length = spec.length
        self.seen = 0
        self._memory: dict[str, tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def feed(self, tokens: Tensor) -> Tensor:
        """Logits [B, T, outputs], those the whole sequence so far would give at its end."""
        batch, count = tokens.shape
        start, end = self.seen, self.seen + count
        if end > self.length:
            raise SpecError(f"position {end} is beyond the model's length of {self.length}")
        if start and count > 1:
            raise SpecError(f"{count} positions at once; after the first feed, one at a time")
        # Steps of one position: fused kernels, made for thousands, would gain nothing.
        with kernels.reference_kernels():
            x = self._embed(tokens, start, end)
            for name, operator in self.model.operators.items():
                assert isinstance(operator, Operator)
                if isinstance(operator, Attention):
                    x = self._attend(name, operator, x, batch, start)
                else:
                    x = operator(x, batch)
            logits = self.model.classifier(x)
        self.seen = end
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
            new = [torch.cat(pair, dim=2) for pair in zip(self._memory[name], new, strict=True)]
        k, v = self._memory[name] = (new[0], new[1])
        # The last position sees all there is; only a first feed has a future to hide.
        return operator.project_out(x, kernels.attend(q, k, v, operator.softmax_scale, start == 0))


def sample(
    model: Transformer,
    prompt: Sequence[int],
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    generator: torch.Generator | None = None,
) -> Iterator[int]:
    """Tokens that go on from the prompt, without end; ask for as many as you want.

    Each is drawn from softmax(logits / temperature), of the `top_k` likeliest where that is
    not 0; at temperature 0 it is the likeliest. Where the model's length is used up, the
    last half of it is read again from position 0, and decoding goes on from there.
    """
    if not prompt:
        raise SpecError("the prompt is empty; give at least one token to go on from")
    if not temperature >= 0:
        raise SpecError(f"temperature {temperature}: must be 0 or more")
    decoder = Decoder(model)

    def draw(logits: Tensor) -> int:
        return _draw(logits, temperature, top_k, generator)

    return _go_on(decoder, list(prompt), draw)


def _go_on(decoder: Decoder, text: list[int], draw: Callable[[Tensor], int]) -> Iterator[int]:
    device = decoder.model.sites.device
    half = max(1, decoder.length // 2)
    new = text if len(text) <= decoder.length else text[-half:]
    while True:
        logits = decoder.feed(torch.tensor([new], device=device))[0, -1]
        text.append(draw(logits.float()))
        yield text[-1]
        new = text[-1:]
        if decoder.seen == decoder.length:
            decoder = Decoder(decoder.model)
            new = text[-half:]


def _draw(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator | None) -> int:
    if temperature == 0:
        return int(logits.argmax())
    if 0 < top_k < len(logits):
        least = logits.topk(top_k).values[-1]
        logits = logits.masked_fill(logits < least, -torch.inf)
    # From the largest down: a temperature next to 0 must not overflow.
    shares = ((logits - logits.max()) / temperature).softmax(0)
    return int(torch.multinomial(shares, 1, generator=generator))
