"""Language model over the tokens of a tokenizer: predict the next token of a text.

The loss is in nats per token, the metric in bits per byte: the bits of the counted tokens over the
bytes of text that these tokens stand for.
"""

import functools
import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gaugelasso.files import tokenizer as files
from gaugelasso.tasks import windows
from gaugelasso.tasks.protocol import Draw, Predict
from gaugelasso.tasks.stored import expand
from gaugelasso.tasks.token_text import TokenText


@dataclass(frozen=True)
class Tokens(TokenText):
    causal: ClassVar[bool] = True

    @property
    def metric_name(self) -> str:
        """Without a tokenizer, the bytes that tokens stand for are not known."""
        return "bits per byte" if self.tokenizer else "bits per token"

    @property
    def end(self) -> int | None:
        """The token that ends a text, if the tokenizer's folder names one."""
        return files.end_token(self.reader, expand(self.tokenizer, "task.tokenizer"))

    def batch(self, size: int, draw: Draw, device: str) -> tuple[Tensor, Tensor]:
        rows = windows.drawn(self.part(draw.stream), size, draw, self.length)
        return windows.split_targets(rows, device)

    def metric(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Bits of the targets over their bytes."""
        bits = self.loss(outputs, targets) / math.log(2)
        if not self.tokenizer:
            return bits
        return bits * targets.numel() / self._sizes.to(targets.device)[targets].sum().clamp(min=1)

    @functools.cached_property
    def _sizes(self) -> Tensor:
        """The bytes of every token of the vocabulary, which may be larger than the tokenizer's."""
        sizes = torch.zeros(self.inputs, dtype=torch.long)
        sizes[: self.reader.size] = torch.from_numpy(self.reader.sizes)
        return sizes

    def _figures(self, part: windows.Array, predict: Predict, device: str) -> dict[str, float]:
        """Loss in nats per token, bits per byte, perplexity, and the numbers of both."""
        given = part, self.length, self.at_once, predict, self.loss, device
        total = windows.total_loss(*given).item()
        counted = len(part) - 1
        figures = {"loss": total / counted, self.metric_name: total / counted / math.log(2)}
        if self.tokenizer:
            # Every token but the first is predicted once.
            size = int(self._sizes.numpy()[part[1:]].sum())
            figures[self.metric_name] = total / math.log(2) / max(size, 1)
            figures["bytes per token"] = size / counted
        return figures | {"perplexity per token": math.exp(min(total / counted, 700.0))}
