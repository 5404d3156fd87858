"""Character language model: predict the next byte of a text.

Training goes through the text in epochs. An epoch contains every adjacent window of `length`
bytes once, in a random order and from a random offset. Order and offset depend on the run's
seed and the epoch alone, so a batch can be drawn without those before it.

The validation text is split by position: the first half is for selection, the second half for
the test, with an unused window between them. Halves, rather than alternating windows, because
adjacent windows continue each other. Held-out batches are the windows of a half in order.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from gaugelasso import kernels
from gaugelasso.errors import UserError
from gaugelasso.models import InputKind
from gaugelasso.tasks import text
from gaugelasso.tasks.protocol import SELECTION, TEST, TRAINING, Draw, Predict
from gaugelasso.tasks.stored import cache_folder, shuffled, to_device

# Positions in a batch of a pass over all held-out text: enough to keep any device busy.
_POSITIONS = 2**14
# Windows that selection and test need at least, and windows between them.
_LEAST_WINDOWS, _GAP = 2, 1


@dataclass(frozen=True)
class CharLM:
    source: Literal["files", "pg19"] = "files"
    path: str = ""
    valid: str = ""
    split: float = 0.0
    cache: str = ""
    length: int = 512

    # Bits, because the mean over batches is the figure of the whole; for perplexity it is not.
    metric_name: ClassVar[str] = "bits per byte"
    metric_lower_is_better: ClassVar[bool] = True
    input_kind: ClassVar[InputKind] = "tokens"
    causal: ClassVar[bool] = True
    has_end: ClassVar[bool] = True
    inputs: ClassVar[int] = 256
    outputs: ClassVar[int] = 256

    def __post_init__(self) -> None:
        if not 1 <= self.length <= 2**20:
            raise UserError(f"task.length = {self.length}: must be 1 to {2**20}")
        if not 0 <= self.split < 1:
            raise UserError(f"task.split = {self.split}: must be in [0, 1)")
        if self.source == "pg19" and (self.path or self.valid or self.split):
            raise UserError("task.source = 'pg19' has its own split: remove task.path, "
                            "task.valid and task.split")  # fmt: skip
        if self.valid and self.split:
            raise UserError("task.valid and task.split are both set; remove one of them")

    @functools.cached_property
    def texts(self) -> tuple[text.Text, text.Text]:
        """Training and validation bytes, opened on first use."""
        train, valid = self._open()
        windows = 2 * _LEAST_WINDOWS + _GAP
        halves = f" ({_LEAST_WINDOWS} windows for selection and {_LEAST_WINDOWS} for the test)"
        for name, origin, part, least, why in (
            ("training", self.path, train, self.length + 1, ""),
            ("validation", self.valid or self.path, valid, windows * self.length + 1, halves),
        ):
            if len(part) < least:
                raise UserError(
                    f"the {name} text of {origin or self.source!r} has {len(part):,} bytes; "
                    f"task.length = {self.length} needs at least {least:,}{why}: give more "
                    "text, or lower task.length"
                )
        return train, valid

    def part(self, stream: int) -> text.Text:
        """The bytes that a stream reads; no two streams share one."""
        train, valid = self.texts
        selection_windows = ((len(valid) - 1) // self.length - _GAP) // 2
        # The last target of a window is the byte after it.
        selection = valid[: selection_windows * self.length + 1]
        test = valid[(selection_windows + _GAP) * self.length :]
        return {TRAINING: train, SELECTION: selection, TEST: test}[stream]

    def stored_data(self) -> dict[str, text.Text]:
        origins = (self.path or self.source, self.valid or self.path or self.source)
        names = (f"training text of {origins[0]!r}", f"validation text of {origins[1]!r}")
        return dict(zip(names, self.texts, strict=True))

    def _open(self) -> tuple[text.Text, text.Text]:
        cache = cache_folder(self.cache)
        if self.source == "pg19":
            return text.load_pg19("train", cache), text.load_pg19("validation", cache)
        files = text.find(self.path, "task.path")
        if self.valid:
            held_out = text.find(self.valid, "task.valid")
            # task.valid may lie inside the folder task.path.
            files = text.without(files, held_out)
            if not files:
                raise UserError(
                    f"task.valid = {self.valid!r} contains all of task.path = {self.path!r}, so "
                    "no text is left to train on; give another text in task.valid, or remove it "
                    "and hold out a share with task.split"
                )
            return text.load(files, cache), text.load(held_out, cache)
        if len(files) > 1:
            train, valid = text.hold_out(files, self.split)
            return text.load(train, cache), text.load(valid, cache)
        if not self.split:
            raise UserError(
                f"task.path = {self.path!r} is one file: give another in task.valid, or hold out "
                "a share at its end with task.split, for example task.split=0.05"
            )
        everything = text.load(files, cache)
        end = len(everything) - round(self.split * len(everything))
        return everything[:end], everything[end:]

    def batch(self, size: int, draw: Draw, device: str) -> tuple[Tensor, Tensor]:
        part = self.part(draw.stream)
        positions = draw.index * size + np.arange(size)
        if draw.held_out:
            # Starts again from the first window after the last.
            starts = self.length * (positions % ((len(part) - 1) // self.length))
        else:
            starts = self._training_starts(positions, draw.run, len(part))
        return _split_targets(part[starts[:, None] + np.arange(self.length + 1)], device)

    def _training_starts(self, positions: np.ndarray, run: int, size: int) -> np.ndarray:
        """First bytes of the windows at these positions, which count through all epochs."""
        # One window fewer than would fit leaves room for the epoch's offset.
        count = max(1, size // self.length - 1)
        max_offset = size - 1 - count * self.length
        windows, offsets = shuffled(positions, count, run, max_offset)
        return offsets + self.length * windows

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return kernels.cross_entropy(outputs, targets)

    def metric(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.loss(outputs, targets) / math.log(2)

    def final_figures(
        self, predict: Predict, size: int, draws: Sequence[Draw], device: str
    ) -> dict[str, float]:
        """Figures of all the text of the draws' stream, however many draws there are."""
        return self.whole_figures(predict, size, device, draws[0].stream)

    def whole_figures(
        self, predict: Predict, size: int, device: str, stream: int = TEST
    ) -> dict[str, float]:
        """Loss, bits and perplexity per byte of the stream's text; `size` is not used.

        Every byte but the first is predicted once, from those before it in its window.
        """
        part = self.part(stream)
        size = max(1, _POSITIONS // self.length)
        total = torch.zeros((), device=device, dtype=torch.float64)
        windows = math.ceil((len(part) - 1) / self.length)
        for first in range(0, windows, size):
            rows = np.arange(first, min(first + size, windows))
            at = self.length * rows[:, None] + np.arange(self.length + 1)
            # The last window may extend past the end; positions there are masked.
            inputs, targets = _split_targets(part[np.minimum(at, len(part) - 1)], device)
            past_end = torch.from_numpy(at[:, 1:] >= len(part)).to(device)
            counted = (~past_end).sum()
            loss = self.loss(predict(inputs), targets.masked_fill(past_end, kernels.NO_TARGET))
            total += loss.double() * counted
        mean = total / (len(part) - 1)
        loss, perplexity = torch.stack([mean, mean.exp()]).tolist()
        return {"loss": loss, self.metric_name: loss / math.log(2), "perplexity": perplexity}


def _split_targets(rows: text.Text, device: str) -> tuple[Tensor, Tensor]:
    """Inputs and targets, which are the inputs one byte later."""
    tensor = to_device(rows, device).long()
    return tensor[:, :-1].contiguous(), tensor[:, 1:].contiguous()
