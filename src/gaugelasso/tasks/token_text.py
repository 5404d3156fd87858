"""Text or arrays of tokens as data: what the tasks over the vocabulary of a tokenizer share.

Text files go through the tokenizer once; arrays of tokens (.npy) are taken as they are. Windows
and splits are those of windows.py. The loss is in nats per token that is predicted.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from torch import Tensor

from gaugelasso import kernels
from gaugelasso.errors import UserError
from gaugelasso.files import tokenizer as files
from gaugelasso.files.tokenizer import Tokenizer, load_tokenizer
from gaugelasso.models import InputKind
from gaugelasso.tasks import text, windows
from gaugelasso.tasks.protocol import TEST, Draw, Predict
from gaugelasso.tasks.stored import cache_folder, expand
from gaugelasso.tasks.tokenised import load_array, tokenised

# Positions, and logits, in a batch of a pass over held-out text: a vocabulary may be large.
_POSITIONS, _LOGITS = 2**14, 2**27
_MOST_TOKENS = 2**22
_ARRAY = ".npy"


@dataclass(frozen=True)
class TokenText:
    """The data; a subclass says what is predicted of a window, by `batch` and `_figures`."""

    path: str = ""
    valid: str = ""
    split: float = 0.0
    tokenizer: str = ""
    vocabulary: int = 0  # 0: that of the tokenizer
    cache: str = ""
    length: int = 512

    metric_lower_is_better: ClassVar[bool] = True
    metric_best: ClassVar[float] = 0.0
    input_kind: ClassVar[InputKind] = "tokens"
    has_end: ClassVar[bool] = True
    loss_unit: ClassVar[str] = "nats per token"
    # Whether the tokens of a text must stand for all of its bytes.
    exact: ClassVar[bool] = True
    # Tokens after a window that its targets need: the last target is the next token.
    after: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if not 1 <= self.length <= 2**20:
            raise UserError(f"task.length = {self.length}: must be 1 to {2**20}")
        if not 0 <= self.split < 1:
            raise UserError(f"task.split = {self.split}: must be in [0, 1)")
        if not 0 <= self.vocabulary <= _MOST_TOKENS:
            raise UserError(f"task.vocabulary = {self.vocabulary}: must be 0 to {_MOST_TOKENS}")
        if self.valid and self.split:
            raise UserError("task.valid and task.split are both set; remove one of them")
        if not (self.tokenizer or self.vocabulary):
            raise UserError(
                "task.tokenizer is empty; give a tokenizer.json, or a folder with one; for arrays "
                "of tokens (.npy) task.vocabulary is enough, and model.from names both"
            )

    @property
    def inputs(self) -> int:
        return self.vocabulary or self.reader.size

    @property
    def outputs(self) -> int:
        return self.inputs

    @functools.cached_property
    def reader(self) -> Tokenizer:
        """The tokenizer, read on first use; UserError if it does not fit the vocabulary."""
        if not self.tokenizer:
            raise UserError(
                "task.tokenizer is empty, and text needs one; give a tokenizer.json, or a folder "
                "with one"
            )
        found = load_tokenizer(expand(self.tokenizer, "task.tokenizer"))
        if self.vocabulary:
            found.check_fits(self.vocabulary, "the model")
        return found

    @property
    def window(self) -> int:
        """Tokens of the text in a window."""
        return self.length

    # --- data -------------------------------------------------------------------------

    @functools.cached_property
    def texts(self) -> tuple[windows.Array, windows.Array]:
        """Training and validation tokens, opened on first use."""
        train, valid = self._open()
        origins = self.path, self.valid or self.path
        windows.check_long_enough(
            train, valid, self.length, "tokens", origins, split=self.split, window=self.window
        )
        return train, valid

    def _open(self) -> tuple[windows.Array, windows.Array]:
        if self.path.endswith(_ARRAY) or self.valid.endswith(_ARRAY):
            if self.valid:
                if self.valid == self.path:
                    raise UserError(
                        f"task.valid = {self.valid!r} is task.path too; give other tokens, or hold "
                        "out a share with task.split"
                    )
                return self._all(self.path, "task.path"), self._all(self.valid, "task.valid")
            return text.split_end(self._all(self.path, "task.path"), self.path, self.split)
        train, valid = text.load_parts(self.path, self.valid, self.split, self._cache)
        return self._tokens(train, self.path), self._tokens(valid, self.valid or self.path)

    def _all(self, path: str, key: str) -> windows.Array:
        """All tokens of an array, or of the text of a file or a folder."""
        if path.endswith(_ARRAY):
            return load_array(expand(path, key), key, self.inputs)
        return self._tokens(text.load(text.find(path, key), self._cache), path)

    def _tokens(self, data: text.Text, origin: str) -> windows.Array:
        return tokenised(data, self.reader, self._cache, origin, self.exact)

    @property
    def _cache(self) -> Path:
        return cache_folder(self.cache)

    def part(self, stream: int) -> windows.Array:
        """The tokens that a stream reads; no two streams share one."""
        return windows.part_of(*self.texts, stream, self.window, self.after)

    def whole_windows(self, stream: int) -> int:
        """Adjacent windows in the tokens of a stream."""
        return (len(self.part(stream)) - self.after) // self.window

    def stored_data(self) -> dict[str, np.ndarray]:
        origins = self.path, self.valid or self.path
        names = (f"training tokens of {origins[0]!r}", f"validation tokens of {origins[1]!r}")
        found = dict(zip(names, self.texts, strict=True))
        read = {"tokenizer": np.frombuffer(self.reader.data, np.uint8)} if self.tokenizer else {}
        return {**found, **read}

    def kept_files(self) -> dict[str, bytes]:
        """The files of the tokenizer: a model is of no use without them."""
        if not self.tokenizer:
            return {}
        place = expand(self.tokenizer, "task.tokenizer")
        return files.read_files(place) if place.is_dir() else {files.NAME: self.reader.data}

    # --- figures ----------------------------------------------------------------------

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return kernels.cross_entropy(outputs, targets)

    def final_figures(
        self, predict: Predict, size: int, draws: Sequence[Draw], device: str
    ) -> dict[str, float]:
        """Figures of the windows of the draws, each window once."""
        part = self.part(draws[0].stream)
        return self._figures(part[: len(draws) * size * self.window + self.after], predict, device)

    def whole_figures(
        self, predict: Predict, size: int, device: str, stream: int = TEST
    ) -> dict[str, float]:
        """Figures of all tokens of the stream; `size` is not used."""
        return self._figures(self.part(stream), predict, device)

    def text_figures(self, predict: Predict, device: str, most: int = 0) -> dict[str, float]:
        """Figures of all of `path`, which is not split, or of its first `most` tokens."""
        part, least = self._all(self.path, "task.path"), 1 + self.after
        if len(part) < least:
            raise UserError(f"{self.path!r} has {len(part)} tokens; at least {least} are needed")
        return self._figures(part[: most + self.after] if most else part, predict, device)

    def _figures(self, part: windows.Array, predict: Predict, device: str) -> dict[str, float]:
        """Loss, metric and further figures of a sequence, by its adjacent windows."""
        raise NotImplementedError

    @property
    def at_once(self) -> int:
        """Windows of a batch of a pass over held-out text."""
        return max(1, min(_POSITIONS, _LOGITS // self.inputs) // self.length)
