"""A run of the trainer along a course: `target.loss` is the loss of the final model.

The driver decides and acts. This gives it the settings of a config and the checkpoints on disk.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from gaugelasso.compress.compressor import Compressor
from gaugelasso.compress.course_driver import CourseDriver
from gaugelasso.compress.courses.choice import course_of
from gaugelasso.compress.courses.metric_target import MetricTarget
from gaugelasso.compress.courses.stages import Phase
from gaugelasso.compress.courses.window import Measured
from gaugelasso.config import Config
from gaugelasso.runs.checkpoint import Checkpoint
from gaugelasso.training.answers import failure_advice
from gaugelasso.training.records import RunRecord
from gaugelasso.training.rollback import Rollback

if TYPE_CHECKING:
    from gaugelasso.training.run_log import RunLog
    from gaugelasso.training.state import RunState


def metric_target(config: Config) -> MetricTarget | None:
    """The metric that the config names, with its direction."""
    if config.target.metric is None:
        return None
    return MetricTarget(config.target.metric, config.task.metric_lower_is_better)


class CourseRun(CourseDriver):
    """`measure(thorough)` measures the present model on selection data."""

    def __init__(self, state: "RunState", measure: Callable[[bool], Measured], log: "RunLog"):
        config, train = state.config, state.config.train
        course = course_of(
            config.target.named,
            metric_target(config),
            config.target.fma,
            train.steps,
            config.compress.lr,
            warmup=train.warmup,
            anneal=train.cooldown,
            least_rate=train.lr_min,
            by_harm=config.compress.removal == "harm",
        )
        super().__init__(course, StatesOnDisk(state), measure, log, train.skip_limit)
        self._state, self._every = state, train.checkpoint_every
        self.saved_at = 0  # the last checkpoint that was due

    def to_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps. It has the keys of a pressed run too."""
        held_at, held_fma = self.course.held_at, self.course.held_fma
        held = {} if held_at is None else {held_at: held_fma}
        here = {"saved_at": self.saved_at, "held_at": held_at, "held": held}
        return {**_FRESH, **here, **self.numbers()}

    def load_(self, values: Mapping[str, Any]) -> None:
        super().load_(values)
        self.saved_at = values["saved_at"]

    def where(self) -> str:
        return self._state.where()

    def phase(self, step: int) -> Phase:
        return self.course.phase(step)

    def interval_closed(self) -> None:
        """Nothing follows from a logging interval."""

    def checkpoint_due(self, record: RunRecord) -> bool:
        """Whether a checkpoint is due now, or was due while steps failed."""
        return self.now == self.end or self.now // self._every > self.saved_at // self._every

    def before_save(self, record: RunRecord) -> None:
        """A due checkpoint is about to be written."""
        self.saved_at = self.fallback_step = self.now

    def wanted_steps(self) -> list[int]:
        """Checkpoints to keep beside the newest: the run may return to them."""
        newest = [] if self.fallback_step is None else [self.fallback_step]
        return newest + self.course.kept_steps()

    def is_missed(self, record: RunRecord) -> bool:
        """Whether a final model that does not hold its target means that the run has failed."""
        return True


class StatesOnDisk:
    """The checkpoints of a run; those that are to be kept are written when the step is over."""

    def __init__(self, state: "RunState"):
        self._state = state
        self._found: dict[int, Checkpoint] = {}

    @property
    def compressor(self) -> Compressor:
        return self._state.compressor

    def keep(self, name: int, wanted: list[int]) -> None:
        """The log writes it, after the row of this step."""

    def find(self, names: Iterable[int]) -> int | None:
        return self._noted(self._state.saved.first_intact(names))

    def newest(self) -> int | None:
        return self._noted(self._state.saved.newest())

    def _noted(self, found: Checkpoint | None) -> int | None:
        if found is None:
            return None
        self._found[found.step] = found
        return found.step

    def step_of(self, name: int) -> int:
        return name

    def measured(self, name: int) -> Measured | None:
        found = self._state.saved.measured(self._found[name])
        return Measured(found.loss, found.metric)

    def load(self, name: int) -> None:
        self._state.load(self._found[name])

    def advice(self, name: int | None) -> str:
        return failure_advice(None if name is None else self._found[name])


# The numbers of a pressed run that has not begun.
_FRESH: dict[str, Any] = {
    each.name: each.default_factory()
    if each.default is dataclasses.MISSING and each.default_factory is not dataclasses.MISSING
    else each.default
    for each in dataclasses.fields(Rollback)
    if each.metadata.get("saved", True)
}
