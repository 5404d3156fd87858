"""Character language model: the next byte of a text.

Training goes through the text in epochs. In each, windows of `length` bytes side by side,
begun at an offset of the epoch's own, are all read once, in an order of its own; both
depend on the run's seed and the epoch alone, so batch k needs no memory of those before.
Held-out batches are the windows of the validation text from its start, in order.
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
from gaugelasso.tasks.protocol import Draw, Predict
from gaugelasso.tasks.stored import cache_folder, shuffled, to_device

# Positions in a batch of the last evaluation: large enough to be quick on any device.
_AT_ONCE = 2**14


@dataclass(frozen=True)
class CharLM:
    source: Literal["files", "pg19"] = "files"
    path: str = ""
    valid: str = ""
    split: float = 0.0
    cache: str = ""
    length: int = 512

    # A mean of batches is the figure of all of them; of perplexities it would not be.
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
            raise UserError("task.source = 'pg19' brings its own split: leave out task.path, "
                            "task.valid and task.split")  # fmt: skip
        if self.valid and self.split:
            raise UserError("task.valid and task.split: give one of them")

    @functools.cached_property
    def texts(self) -> tuple[text.Text, text.Text]:
        """Training and validation bytes, opened when they are first asked for."""
        both = self._open()
        origins = (self.path, self.valid or self.path)
        for name, origin, part in zip(("training", "validation"), origins, both, strict=True):
            if len(part) <= self.length:
                raise UserError(
                    f"the {name} text of {origin or self.source!r} has {len(part):,} bytes; "
                    f"task.length = {self.length} needs at least {self.length + 1:,}: give more "
                    "text, or lower task.length"
                )
        return both

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
            # A folder's files may be named again: nobody trains on what is to measure it.
            files = text.without(files, held_out)
            if not files:
                raise UserError(
                    f"task.valid = {self.valid!r} holds all of task.path = {self.path!r}, so "
                    "nothing is left to train on; name another text in task.valid, or leave it "
                    "out and hold out a share with task.split"
                )
            return text.load(files, cache), text.load(held_out, cache)
        if len(files) > 1:
            train, valid = text.hold_out(files, self.split)
            return text.load(train, cache), text.load(valid, cache)
        if not self.split:
            raise UserError(
                f"task.path = {self.path!r} is one file: name another in task.valid, or hold out "
                "a share at its end with task.split, as in task.split=0.05"
            )
        whole = text.load(files, cache)
        end = len(whole) - round(self.split * len(whole))
        return whole[:end], whole[end:]

    def batch(self, size: int, draw: Draw, device: str) -> tuple[Tensor, Tensor]:
        train, valid = self.texts
        places = draw.index * size + np.arange(size)
        if draw.held_out:
            # Round again where the text is shorter than what is asked for.
            starts = self.length * (places % ((len(valid) - 1) // self.length))
        else:
            starts = self._starts(places, draw.run, len(train))
        part = valid if draw.held_out else train
        return _apart(part[starts[:, None] + np.arange(self.length + 1)], device)

    def _starts(self, places: np.ndarray, run: int, size: int) -> np.ndarray:
        """Where the windows of these places begin, counted through all epochs."""
        # One window fewer than would fit leaves room for an offset.
        count = max(1, size // self.length - 1)
        most = size - 1 - count * self.length
        windows, offsets = shuffled(places, count, run, most)
        return offsets + self.length * windows

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return kernels.cross_entropy(outputs, targets)

    def metric(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.loss(outputs, targets) / math.log(2)

    def final_figures(
        self, predict: Predict, size: int, draws: Sequence[Draw], device: str
    ) -> dict[str, float]:
        """Those of the whole validation text, whatever the draws."""
        return self.whole_figures(predict, size, device)

    def whole_figures(self, predict: Predict, size: int, device: str) -> dict[str, float]:
        """Loss, bits and perplexity per byte, in batches of a size of its own.

        Every byte but the first is predicted once, from those before it in its window.
        """
        _, valid = self.texts
        size = max(1, _AT_ONCE // self.length)
        total = torch.zeros((), device=device, dtype=torch.float64)
        windows = math.ceil((len(valid) - 1) / self.length)
        for first in range(0, windows, size):
            rows = np.arange(first, min(first + size, windows))
            places = self.length * rows[:, None] + np.arange(self.length + 1)
            # The last window may go beyond the end: what is there does not count.
            inputs, targets = _apart(valid[np.minimum(places, len(valid) - 1)], device)
            beyond = torch.from_numpy(places[:, 1:] >= len(valid)).to(device)
            counted = (~beyond).sum()
            loss = self.loss(predict(inputs), targets.masked_fill(beyond, kernels.NO_TARGET))
            total += loss.double() * counted
        mean = total / (len(valid) - 1)
        loss, perplexity = torch.stack([mean, mean.exp()]).tolist()
        return {"loss": loss, self.metric_name: loss / math.log(2), "perplexity": perplexity}


def _apart(rows: text.Text, device: str) -> tuple[Tensor, Tensor]:
    """Inputs and targets, a byte apart."""
    tensor = to_device(rows, device).long()
    return tensor[:, :-1].contiguous(), tensor[:, 1:].contiguous()
