"""The states that a run along a course may return to, and their form in memory.

A state's name is the point of the course at which it was kept.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from gaugelasso.compress.courses.window import Measured
from gaugelasso.compress.model_state import ModelState
from gaugelasso.compress.resume_state import ResumeState
from gaugelasso.compress.saved_state import SavedState

if TYPE_CHECKING:
    from gaugelasso.compress.compressor import Compressor


class States(Protocol):
    """Kept states of a run, in memory or on disk."""

    @property
    def compressor(self) -> "Compressor":
        """The compressor with the present state; `load` may replace it."""

    def keep(self, name: int, wanted: list[int]) -> None:
        """Keep the present state under this name, and drop those that are not wanted."""

    def find(self, names: Iterable[int]) -> int | None:
        """The first of these that is there and undamaged."""

    def newest(self) -> int | None:
        """The newest state that is there."""

    def step_of(self, name: int) -> int:
        """The number of steps that a state had."""

    def measured(self, name: int) -> Measured | None:
        """A state's figures on selection data; None: as they were when it was kept."""

    def load(self, name: int) -> None:
        """Put a state back; each can be loaded any number of times."""

    def advice(self, name: int | None) -> str:
        """What to do if steps go on to fail; `name` is the state to return to, if there is one."""


class Loadable(Protocol):
    """One state that was kept, in memory or on disk."""

    def load_(self, state: ModelState, resume_state: ResumeState) -> None:
        """Put the state back; it can be loaded any number of times."""


class StatesInMemory:
    """Two or three states at most, as many as a course wants. The compressor and its model stay."""

    def __init__(self, compressor: "Compressor"):
        self._compressor = compressor
        self.kept: dict[int, Loadable] = {}
        # Where a name is not the number of steps: with a time budget it is a tick.
        self._steps: dict[int, int] = {}

    @property
    def compressor(self) -> "Compressor":
        return self._compressor

    def keep(self, name: int, wanted: list[int]) -> None:
        state, resume_state = self._compressor.state, self._compressor.resume_state
        if resume_state.finite():
            self.kept[name] = SavedState(state, resume_state)
            self._steps[name] = self._compressor.steps
        self.kept = {each: kept for each, kept in self.kept.items() if each in wanted}

    def find(self, names: Iterable[int]) -> int | None:
        return next((name for name in names if name in self.kept), None)

    def newest(self) -> int | None:
        return max(self.kept, default=None)

    def step_of(self, name: int) -> int:
        return self._steps.get(name, name)

    def measured(self, name: int) -> Measured | None:
        return None

    def load(self, name: int) -> None:
        self.kept[name].load_(self._compressor.state, self._compressor.resume_state)

    def advice(self, name: int | None) -> str:
        return "lower the learning rate (options=CompressorOptions(lr=...)), or check the data"
