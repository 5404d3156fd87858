"""Masked language model: predict some tokens of a text from all others, as BERT is trained.

A share of the tokens of a window is chosen. Most of these become the mask token, some any token,
and some stay as they are. The loss is in nats per chosen token, the metric in bits. A window begins
and ends with the tokens that the tokenizer has for that. Special tokens are chosen last.

The choice in a training batch depends on its draw. In a held-out window it depends on the number of
the window alone, so all runs and batch sizes are measured on the same choice.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from gaugelasso import kernels
from gaugelasso.errors import UserError
from gaugelasso.files.tokenizer import special_token
from gaugelasso.tasks import windows
from gaugelasso.tasks.protocol import Draw, Predict
from gaugelasso.tasks.stored import expand, to_device
from gaugelasso.tasks.token_text import TokenText

# Of the chosen tokens: up to the first share the mask token, up to the second any token.
_MASKED, _CHANGED = 0.8, 0.9


@dataclass(frozen=True)
class MaskedTokens(TokenText):
    masked: float = 0.15
    mask: int = -1  # -1: that of the tokenizer

    metric_name: ClassVar[str] = "bits per masked token"
    loss_unit: ClassVar[str] = "nats per masked token"
    causal: ClassVar[bool] = False
    # Bits are counted by token, so that WordPiece will do, which changes the text.
    exact: ClassVar[bool] = False
    # All targets stand in the window.
    after: ClassVar[int] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.masked < 1:
            raise UserError(
                f"task.masked = {self.masked}: must be a share of the tokens, above 0 and below 1"
            )
        if self.mask < -1:
            raise UserError(
                f"task.mask = {self.mask}: must be the number of a token, or -1 for that of the "
                "tokenizer"
            )
        if self.vocabulary:
            self._check_mask(self.vocabulary)
        if self.mask < 0 and not self.tokenizer:
            raise UserError(
                "task.tokenizer is empty, so the mask token is not known; give a tokenizer, or the "
                "number of the mask token in task.mask"
            )

    def _check_mask(self, tokens: int) -> None:
        if self.mask >= tokens:
            raise UserError(
                f"task.mask = {self.mask}: must be a token of the vocabulary, 0 to {tokens - 1}, "
                "or -1 for that of the tokenizer"
            )

    # --- special tokens ---------------------------------------------------------------

    def _special(self, name: str, *usual: str) -> int | None:
        place = expand(self.tokenizer, "task.tokenizer")
        return special_token(self.reader, place, name, *usual)

    @functools.cached_property
    def mask_token(self) -> int:
        """UserError if neither task.mask nor the tokenizer names one of the vocabulary."""
        if self.mask >= 0:
            self._check_mask(self.inputs)
            return self.mask
        found = self._special("mask_token", "[MASK]", "<mask>")
        if found is None:
            raise UserError(
                f"task.tokenizer = {self.tokenizer!r} has no mask token; give the tokenizer of an "
                "encoder, or the number of a token in task.mask"
            )
        return found

    @functools.cached_property
    def ends(self) -> tuple[int, ...]:
        """The tokens that begin and end a window; none where the tokenizer lacks one of them."""
        if not self.tokenizer:
            return ()
        first = self._special("cls_token", "[CLS]", "<s>")
        last = self._special("sep_token", "[SEP]", "</s>")
        return () if first is None or last is None else (first, last)

    @functools.cached_property
    def _chosen_last(self) -> np.ndarray:
        """Of each token, whether it is special."""
        special = np.zeros(self.inputs, dtype=bool)
        if self.tokenizer:
            added = self.reader.inner.get_added_tokens_decoder()
            special[[number for number, token in added.items() if token.special]] = True
        return special

    @property
    def window(self) -> int:
        found = self.length - len(self.ends)
        if found < 1:
            raise UserError(
                f"task.length = {self.length}: must be at least {len(self.ends) + 1}, because a "
                "window begins and ends with a special token"
            )
        return found

    # --- data -------------------------------------------------------------------------

    def stored_data(self) -> dict[str, np.ndarray]:
        special = np.array([self.mask_token, *self.ends])
        return {**super().stored_data(), "special tokens": special}

    def batch(self, size: int, draw: Draw, device: str) -> tuple[Tensor, Tensor]:
        """Inputs, and targets with NO_TARGET for tokens that were not chosen: [B, S] each."""
        part = self.part(draw.stream)
        if draw.held_out:
            # Starts again from the first window after the last.
            numbers = (draw.index * size + np.arange(size)) % self.whole_windows(draw.stream)
            return self._held_out(part, numbers, self.window, device)
        rows = windows.drawn(part, size, draw, self.window)[:, :-1]
        return self._to_device(*self._hide(rows, np.random.default_rng(draw.seed)), device)

    def _held_out(
        self, part: windows.Array, numbers: np.ndarray, width: int, device: str
    ) -> tuple[Tensor, Tensor]:
        """The windows with these numbers, of each its first `width` tokens."""
        rows = part[self.window * numbers[:, None] + np.arange(width)]
        pairs = [
            self._hide(row[None], np.random.default_rng(int(number)))
            for row, number in zip(rows, numbers, strict=True)
        ]
        inputs, targets = (np.concatenate(each) for each in zip(*pairs, strict=True))
        return self._to_device(inputs, targets, device)

    def _hide(self, rows: np.ndarray, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets of windows [B, w]. In all of them equally many tokens are chosen."""
        rows = rows.astype(np.int64)
        count = max(1, round(self.masked * rows.shape[1]))
        order = random.random(rows.shape) + self._chosen_last[rows]
        chosen = order.argsort(1)[:, :count]
        kept = np.take_along_axis(rows, chosen, 1)
        fate, others = random.random(chosen.shape), random.integers(self._known, size=chosen.shape)
        new = np.where(fate < _MASKED, self.mask_token, np.where(fate < _CHANGED, others, kept))
        inputs, targets = rows.copy(), np.full_like(rows, kernels.NO_TARGET)
        np.put_along_axis(inputs, chosen, new, 1)
        np.put_along_axis(targets, chosen, kept, 1)
        return inputs, targets

    @property
    def _known(self) -> int:
        """Tokens that any token is drawn from: a vocabulary may be larger than its tokenizer."""
        return self.reader.size if self.tokenizer else self.inputs

    def _to_device(
        self, inputs: np.ndarray, targets: np.ndarray, device: str
    ) -> tuple[Tensor, Tensor]:
        if self.ends:
            first, last = (np.full((len(inputs), 1), token) for token in self.ends)
            inputs = np.concatenate([first, inputs, last], 1)
            targets = np.pad(targets, ((0, 0), (1, 1)), constant_values=kernels.NO_TARGET)
        return to_device(inputs, device), to_device(targets, device)

    # --- figures ----------------------------------------------------------------------

    def metric(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.loss(outputs, targets) / math.log(2)

    def _figures(self, part: windows.Array, predict: Predict, device: str) -> dict[str, float]:
        """Figures of the chosen tokens; every token is read once."""
        sums = torch.zeros(3, device=device, dtype=torch.float64)
        for numbers, width in self._batches(len(part)):
            inputs, targets = self._held_out(part, numbers, width, device)
            outputs = predict(inputs)
            counted = (targets != kernels.NO_TARGET).sum()
            right = (outputs.argmax(-1) == targets).sum()
            sums += torch.stack([self.loss(outputs, targets) * counted, right, counted])
        total, right, counted = sums.tolist()
        loss = total / counted
        return {
            "loss": loss,
            self.metric_name: loss / math.log(2),
            "accuracy": right / counted,
            "perplexity per masked token": math.exp(min(loss, 700.0)),
        }

    def _batches(self, tokens: int) -> Iterator[tuple[np.ndarray, int]]:
        """Numbers and width of windows: whole ones, and last what remains, as one of its own."""
        whole, rest = divmod(tokens, self.window)
        for first in range(0, whole, self.at_once):
            yield np.arange(first, min(first + self.at_once, whole)), self.window
        if rest:
            yield np.array([whole]), rest
