"""What a course knows, as a checkpoint keeps it."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from gaugelasso.compress.courses.window import LossWindow
from gaugelasso.errors import UserError

Stage = Literal["start", "trial", "press", "anneal"]
# Given when a course is created, and not kept.
_GIVEN = ("named", "goal", "steps", "lr", "warmup", "anneal", "least_rate", "by_harm", "unit")
# The keys of a trial's row.
_TRIAL = ("step", "fma", "loss_before", "pressed_loss", "selection_loss")
_LARGEST = 1e300
_LISTS = ("recent", "deferred", "trials")
# Fields that older checkpoints do not have.
_ADDED: dict[str, Any] = {
    "present_fma": None, "cut_at": 0, "rungs": [], "given_up": False, "start_at": None,
    "start_fma": None, "start_loss": None, "slower": 1.0, "looked_at": 0,
    "checked": True, "deferred": [],
}  # fmt: skip


def is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= _LARGEST


def _is_trial(row: Any) -> bool:
    if not isinstance(row, Mapping) or sorted(row) != sorted(_TRIAL):
        return False
    return all(is_number(row[key]) or (row[key] is None and key == _TRIAL[-1]) for key in _TRIAL)


@dataclass
class CourseState(LossWindow):
    """Fields that end in `_at` are steps. A negative length or rate follows from the others."""

    steps: int
    lr: float
    warmup: int = -1
    anneal: int = -1
    least_rate: float = -1.0
    by_harm: bool = False  # channels go by their measured harm, without pressure
    unit: str = "FMA per token"  # of `fma`: of all work here, for messages
    # The last call of `advance`; the stage now, and its first and last step.
    advanced_at: int = 0
    stage: Stage = "start"
    began_at: int = 0
    ends_at: int = 0
    # The provisional loss that compression presses towards; how far a trial lowered the loss.
    provisional: float = 0.0
    fall: float = 0.0
    loss_before: float = 0.0
    # The last state whose trial led to the target loss, or the one before all trials, with the fall
    # and the provisional loss of that trial; the least provisional loss that was too loose.
    good_at: int | None = None
    good_fma: float = math.inf
    good_fall: float | None = None
    good_loss: float | None = None
    too_loose: float | None = None
    # The smallest state that had the target loss, at the end of a trial or in the last anneal.
    held_at: int | None = None
    held_fma: float = math.inf
    held_loss: float = math.inf
    # The present work, and when it last changed.
    present_fma: float = math.inf
    cut_at: int = 0
    # Selection loss minus training loss; whether the last anneal lets go.
    gap: float | None = None
    released: bool = False
    # One row for each trial: step, FMA, loss before it, provisional loss, selection loss.
    trials: list[dict[str, Any]] = field(default_factory=list)

    def kept_steps(self) -> list[int]:
        """The steps of the states that the run may return to."""
        return list(self.kept_sizes())

    def kept_sizes(self) -> dict[int, float]:
        """The same, with the work per token of each."""
        sizes = {self.good_at: self.good_fma, self.held_at: self.held_fma}
        return {step: fma for step, fma in sizes.items() if step is not None}

    def ends(self) -> dict[int, float]:
        """The states that the run may end on, the preferred one first, with the loss of each."""
        return {} if self.held_at is None else {self.held_at: self.held_loss}

    def ended_on(self, step: int) -> None:
        """The run ends on this one of `ends`: from now on, it is the state that held."""
        loss, fma = self.ends()[step], self.kept_sizes()[step]
        self.held_at, self.held_fma, self.held_loss = step, fma, loss

    def to_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps; JSON has no infinity."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        finite = {k: None if v == math.inf else v for k, v in values.items() if k not in _GIVEN}
        lists = {name: list(getattr(self, name)) for name in _LISTS}
        return {**finite, **lists}

    def load_(self, values: Mapping[str, Any]) -> None:
        """Take over what `to_dict` gave; UserError if it did not, and nothing is changed."""
        if not isinstance(values, Mapping):
            raise UserError(f"course = {str(values)[:60]}: must be a table of values")
        names, values = list(self.to_dict()), {**_ADDED, **values}
        for name in names:
            if name not in values or not self._is_sound(name, values[name]):
                raise UserError(f"course: {name} = {str(values.get(name))[:60]} is damaged")
        for name in names:
            value = values[name]
            setattr(self, name, list(value) if isinstance(value, list) else value)
        for name in names:
            if getattr(self, name) is None and self._default(name) == math.inf:
                setattr(self, name, math.inf)

    def _default(self, name: str) -> Any:
        return type(self).__dataclass_fields__[name].default

    def _is_sound(self, name: str, value: Any) -> bool:
        """Whether a field can have this value; None stands for a number not known yet."""
        if name in _LISTS:
            sound = _is_trial if name == "trials" else is_number
            return isinstance(value, list) and all(sound(each) for each in value)
        if name == "stage":
            return value in get_args(Stage)
        if isinstance(self._default(name), bool):
            return isinstance(value, bool)
        if value is None:
            return self._default(name) in (None, math.inf)
        if name.endswith("_at"):
            return type(value) is int and 0 <= value <= self.steps
        return is_number(value)
