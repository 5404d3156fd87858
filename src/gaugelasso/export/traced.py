"""The modules that `torch.export` and the ONNX exporter trace, with their inputs and their names.

Names are those that Hugging Face's exporters use, so that programs for such files fit.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental import _config as config

from gaugelasso.export.comparison import random_inputs
from gaugelasso.inference import InferenceModel

Pair = tuple[Tensor, Tensor]
BATCH, LENGTH, PAST, TOTAL = "batch", "sequence_length", "past_sequence_length", "total_length"


class Sequences(nn.Module):
    """Tokens [B, S] or patches [B, S, n] -> outputs [B, S, outputs]."""

    def __init__(self, served: InferenceModel):
        super().__init__()
        self.served = served

    def forward(self, inputs: Tensor) -> Tensor:
        return self.served(inputs)

    def example(self) -> tuple[Any, ...]:
        return (random_inputs(self.served, 2, _size(self.served)).to(self.served.device),)

    def dims(self) -> tuple[Any, ...]:
        return ({0: BATCH, 1: LENGTH},)

    def input_names(self) -> list[str]:
        return ["input_ids" if self.served.spec.input_kind == "tokens" else "pixel_values"]

    def output_names(self) -> list[str]:
        return ["logits"]


class Prompts(Sequences):
    """Tokens [B, S], padded on either side, with mask and positions [B, S] -> logits."""

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor
    ) -> Tensor:
        empty = self.served.empty_past(input_ids.shape[0])
        mask = attention_mask.bool()
        return self.served.forward_past(input_ids, position_ids, mask, empty)[0]

    def example(self) -> tuple[Any, ...]:
        tokens = random_inputs(self.served, 2, _size(self.served)).to(self.served.device)
        positions = torch.arange(tokens.shape[1], device=tokens.device).repeat(2, 1)
        return tokens, torch.ones_like(tokens), positions

    def dims(self) -> tuple[Any, ...]:
        return ({0: BATCH, 1: LENGTH},) * 3

    def input_names(self) -> list[str]:
        return ["input_ids", "attention_mask", "position_ids"]


class Continuations(Prompts):
    """Tokens [B, S] after keys and values of T earlier ones -> logits, and all keys and values.

    The mask is [B, T + S]. T may be 0, so this reads prompts too.
    """

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        past_key_values: list[Pair],
    ) -> tuple[Tensor, list[Pair]]:
        mask = attention_mask.bool()
        return self.served.forward_past(input_ids, position_ids, mask, past_key_values)

    def example(self) -> tuple[Any, ...]:
        tokens, _, positions = super().example()
        with torch.inference_mode(False), torch.no_grad():
            empty = self.served.empty_past(2)
            past = [tuple(_longer(each, 3) for each in pair) for pair in empty]
        mask = tokens.new_ones(2, tokens.shape[1] + 3)
        return tokens, mask, positions, past

    def dims(self) -> tuple[Any, ...]:
        plain = {0: BATCH, 1: LENGTH}
        pair = ({0: BATCH, 2: PAST}, {0: BATCH, 2: PAST})
        layers = len(self.served.empty_past(1))
        return plain, {0: BATCH, 1: TOTAL}, plain, [pair] * layers

    def input_names(self) -> list[str]:
        return [*super().input_names(), *self._pairs("past_key_values")]

    def output_names(self) -> list[str]:
        return ["logits", *self._pairs("present")]

    def _pairs(self, prefix: str) -> list[str]:
        layers = range(len(self.served.empty_past(1)))
        return [f"{prefix}.{layer}.{which}" for layer in layers for which in ("key", "value")]


def has_past(served: InferenceModel) -> bool:
    """Whether the model reads what it writes, and keys and values of earlier tokens serve that."""
    writes_tokens = served.generates and served.spec.outputs <= served.spec.inputs
    return writes_tokens and served.cache_bytes_per_token > 0


@contextlib.contextmanager
def any_sizes() -> Iterator[None]:
    """Within this context, a traced size may also be 0 or 1.

    Otherwise the tracer assumes at least 2 of each, and refuses short prompts and an empty past.
    Its cache of shapes is off: where sizes are free, to fill it takes longer than it saves.
    """
    from torch._dynamo import config as tracing  # late: it takes as long to import as a short run

    sizes: Any = config
    cache: Any = tracing
    with sizes.patch(backed_size_oblivious=True), cache.patch(fake_tensor_cache_enabled=False):
        yield


def _longer(empty: Tensor, length: int) -> Tensor:
    return empty.new_zeros(*empty.shape[:2], length, empty.shape[3])


def _size(served: InferenceModel) -> int:
    # Unlike the batch and the past of the examples, so that the tracer keeps the sizes apart.
    return min(5, served.spec.length)
