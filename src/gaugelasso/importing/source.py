"""A model of another library on the disk: its settings, its tensors' shapes, and their values.

Knows no file format and no family of models: the readers fill it, the families take from it.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from gaugelasso.errors import UserError

_LARGEST = 3e38
# How the names of causal masks end, which earlier versions of transformers saved with GPT-2.
MASKS = (".attn.bias", ".attn.masked_bias")
# And those of the numbers of positions, which they saved with encoders.
PLACES = "embeddings.position_ids"


class Settings:
    """The keys of a config of unknown origin. UserError names the file and the key."""

    def __init__(self, path: Path, table: Mapping[str, Any]):
        self.path, self.table = path, table

    def whole(self, key: str, default: int | None = None) -> int:
        """A whole number above 0; `default` if the key is missing or null."""
        value = self._value(key, default)
        if type(value) is not int or value < 1:
            raise self.error(key, "must be a whole number of at least 1")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number of at least 0 that float32 holds; `default` if the key is missing or null."""
        value = self._value(key, default)
        if type(value) not in (int, float) or not 0 <= value <= _LARGEST:
            raise self.error(key, f"must be a number of 0 to {_LARGEST:g}")
        return float(value)

    def switch(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if type(value) is not bool:
            raise self.error(key, "must be true or false")
        return value

    def require(self, key: str, allowed: Collection[Any], why: str) -> None:
        """UserError unless the key is missing, null, or one of the allowed values."""
        value = self.table.get(key)
        if value is not None and value not in allowed:
            raise self.error(key, f"{why} cannot be imported")

    def error(self, key: str, reason: str) -> UserError:
        value = repr(self.table.get(key))
        shown = value if len(value) <= 60 else f"{value[:57]}..."
        return UserError(f"{str(self.path)!r}: {key} = {shown}: {reason}")

    def _value(self, key: str, default: Any) -> Any:
        value = self.table.get(key)
        if value is None and default is None:
            raise UserError(f"{str(self.path)!r}: key {key!r} is missing")
        return default if value is None else value


@dataclass(frozen=True)
class Source:
    """One model. `read` returns one tensor, in the precision of the file.

    `tokenizer` returns the files of its tokenizer by name, or why there are none.
    """

    path: Path
    architecture: str
    settings: Settings
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], Tensor]
    tokenizer: Callable[[], Mapping[str, bytes] | str] = lambda: {}

    @property
    def parameters(self) -> int:
        """Elements of all tensors of the file but masks and numbers of positions."""
        no_weights = (*MASKS, PLACES)
        shapes = (shape for name, shape in self.shapes.items() if not name.endswith(no_weights))
        return sum(map(math.prod, shapes))
