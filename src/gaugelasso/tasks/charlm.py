"""Character language model: predict the next byte of a text.

Training goes through the text in epochs. The first half of the validation text is for selection,
the second half for the test (see windows.py).
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from gaugelasso import kernels
from gaugelasso.errors import UserError
from gaugelasso.models import InputKind
from gaugelasso.tasks import text, windows
from gaugelasso.tasks.protocol import TEST, Draw, Predict
from gaugelasso.tasks.stored import cache_folder

# Positions in a batch of a pass over all held-out text: enough to keep any device busy.
_POSITIONS = 2**14


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
    metric_best: ClassVar[float] = 0.0
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
        origins = (self.path or self.source, self.valid or self.path or self.source)
        windows.check_long_enough(train, valid, self.length, "bytes", origins, split=self.split)
        return train, valid

    def part(self, stream: int) -> text.Text:
        """The bytes that a stream reads; no two streams share one."""
        return windows.part_of(*self.texts, stream, self.length)

    def stored_data(self) -> dict[str, text.Text]:
        origins = (self.path or self.source, self.valid or self.path or self.source)
        names = (f"training text of {origins[0]!r}", f"validation text of {origins[1]!r}")
        return dict(zip(names, self.texts, strict=True))

    def _open(self) -> tuple[text.Text, text.Text]:
        cache = cache_folder(self.cache)
        if self.source == "pg19":
            return text.load_pg19("train", cache), text.load_pg19("validation", cache)
        return text.load_parts(self.path, self.valid, self.split, cache)

    def batch(self, size: int, draw: Draw, device: str) -> tuple[Tensor, Tensor]:
        rows = windows.drawn(self.part(draw.stream), size, draw, self.length)
        return windows.split_targets(rows, device)

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
        at_once = max(1, _POSITIONS // self.length)
        total = windows.total_loss(part, self.length, at_once, predict, self.loss, device)
        mean = total / (len(part) - 1)
        loss, perplexity = torch.stack([mean, mean.exp()]).tolist()
        return {"loss": loss, self.metric_name: loss / math.log(2), "perplexity": perplexity}
