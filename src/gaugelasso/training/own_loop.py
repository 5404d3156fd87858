"""Records a run in a loop of the user's own: the same run folder as the trainer's.

`info`, `report` and `export` read it as any other. `eval` needs data, which an own loop does not
describe: give it a task with --set task.module=FILE:NAME. Decides nothing.
"""

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from gaugelasso.axes import Compressible
from gaugelasso.compress.events import Event
from gaugelasso.compress.pilot import Pilot
from gaugelasso.compress.result import HELD_OUT, Result
from gaugelasso.errors import UserError, errors_of
from gaugelasso.runs import checkpoint, logs
from gaugelasso.runs.checkpoint import Checkpoint
from gaugelasso.runs.environment import environment
from gaugelasso.runs.folder import RunFolder, is_free
from gaugelasso.runs.reading import OWN_LOOP, read_json
from gaugelasso.runs.structures import check_rebuildable, describe
from gaugelasso.runs.training_work import entry_of
from gaugelasso.runs.writing import check_name
from gaugelasso.training.folder_log import FolderLog
from gaugelasso.training.records import About, Outcome, RunRecord, finite, summary
from gaugelasso.training.resume import FORMER, check_same_profile
from gaugelasso.training.transplant import DiskState, transplant_

# A run has about a hundred intervals; a checkpoint is due every so many.
_SAVE_EVERY = 10
# The recorders of this process by folder. In a notebook a loop is interrupted and started again,
# and the compressor of before, which holds the lock of the folder, is still referenced.
_recorders: "WeakValueDictionary[Path, RunRecorder]" = WeakValueDictionary()


class RunRecorder(FolderLog):
    """Writes the run folder `path`; with `resume`, goes on with the run that is in it.

    An earlier recorder of this process hands the folder over, and its run takes no more steps.
    """

    def __init__(self, path: str | os.PathLike[str], resume: bool = False):
        check_name(Path(path))
        if not resume and not is_free(Path(path)):
            raise UserError(
                f"record = {str(path)!r}: the folder is not empty; give resume=True to go on with "
                "the run in it, or another folder"
            )
        where = Path(os.path.realpath(path))
        if (earlier := _recorders.get(where)) is not None:
            earlier.hand_over_()
        self._made = not where.exists()
        folder = RunFolder.open(Path(path), "resume" if resume else "refuse")
        super().__init__(folder, RunRecord(), "")
        _recorders[where] = self
        self._handed_over = False
        self._found = checkpoint.find(self.folder.checkpoints) if resume else None
        self._intervals = 0
        # When the structure of each kept state last changed.
        self._cut_at: dict[int, int] = {}

    def hand_over_(self) -> None:
        """Release the folder: another recorder of this process goes on with the run."""
        self._handed_over = True
        self.folder.close()

    def _check_own(self) -> None:
        if self._handed_over:
            raise UserError(
                f"a later Compressor has taken over the run in {str(self.folder.path)!r}; use that "
                "one, or create one with resume=True"
            )

    @contextlib.contextmanager
    def _released_on_error(self) -> Iterator[None]:
        """If the run cannot begin, release the folder, and remove it if it is new and empty."""
        try:
            yield
        except BaseException:
            self.folder.close()
            if self._made:
                with contextlib.suppress(OSError):  # something is in it
                    self.folder.path.rmdir()
            raise

    # --- the start ------------------------------------------------------------------------

    def prepare(self, model: Compressible) -> None:
        """Give the model the structure and weights of the newest checkpoint.

        UserError if no checkpoint of the model could be loaded: better now than at the end.
        """
        with self._released_on_error():
            check_rebuildable(model)
            if self._found is not None:
                device = next(model.parameters()).device
                transplant_(self._found.model(str(device)), model)

    def begin(self, pilot: Pilot) -> None:
        self.pilot, compressor = pilot, pilot.compressor
        self._options = compressor.options
        self.metric_name = _metric_name(pilot)
        self._device = str(compressor.optimizer.store.weight.device)
        if self._found is not None:
            with self._released_on_error():
                self._resume(self._found)
            return
        self.record.fma_initial = compressor.fma
        self.record.parameters_initial = compressor.parameters
        self._write_config()
        self.folder.write("environment.json", environment(self._device))
        self.folder.rewind()
        reach = pilot.metric_target
        direction = {"lower_is_better": reach is None or reach.lower_is_better}
        initial = {
            "metric": {"name": self.metric_name, **direction},
            "evaluated_on": pilot.measured_on,
            "fma": compressor.fma,
            "widths": compressor.widths,
            "costs": compressor.state.costs(),
        }
        self.folder.write("initial.json", {**initial, **describe(compressor.model)})

    def _config(self) -> dict[str, Any]:
        """What the loop has of a config: no task, and the model as initial.json describes it."""
        compressor, course = self.pilot.compressor, self.pilot.course
        reach, work = self.pilot.metric_target, {"fma": compressor.fma_target}
        metric = {} if reach is None else {"metric": reach.value}
        return {
            "task": {"name": OWN_LOOP},
            "model": {},
            "target": {"loss": self.pilot.loss_target, **metric, "hold": "final", **work},
            "compress": dataclasses.asdict(compressor.options),
            "train": {"seed": 0, "steps": course.steps, "eval_every": course.grain},
        }

    def _write_config(self) -> None:
        self._options = self.pilot.compressor.options
        self.folder.write("config.json", self._config())

    def _resume(self, found: Checkpoint) -> None:
        path, pilot, compressor = found.path / "state.json", self.pilot, self.pilot.compressor
        before, now = read_json(self.folder.path / "config.json"), self._config()
        for section in ("target", "compress", "train"):
            for key, value in now[section].items():
                if (old := before.get(section, {}).get(key, FORMER.get(key))) != value:
                    raise UserError(
                        f"resume: {section}.{key} = {value!r}, but the run in "
                        f"{str(self.folder.path)!r} began with {old!r}; keep its setting"
                    )
        self._resume_as_it_began()
        state, tensors = found.state()
        steps = state.pop("steps")
        with errors_of(path):
            self.record.load_(state)
            pilot.load_(state)
        with errors_of(found.path / "optimizer.safetensors"):
            compressor.load_state_tensors_(tensors, steps)
        compressor.fma_initial = self.record.fma_initial
        pilot.parameters_initial = self.record.parameters_initial
        pilot.metric = self.record.metric if pilot.metric_target is not None else None
        found.restore_random_()
        for name in pilot.course.kept_steps():
            saved = checkpoint.at_step(self.folder.checkpoints, name)
            pilot.memory.kept[name] = DiskState(saved)
            self._cut_at[name] = saved.state()[0]["cut_at"]
        self.folder.rewind(found.marks(), steps)
        self.start_clock(steps)
        self.folder.append(logs.RESUMED, {"step": steps, **environment(self._device)})

    def _resume_as_it_began(self) -> None:
        """Check the present loop against initial.json, and take the metric's name from there."""
        path, pilot = self.folder.path / "initial.json", self.pilot
        check_same_profile(pilot.compressor.state.costs(), path)
        with errors_of(path):
            initial = read_json(path)
            self.metric_name = str(initial["metric"]["name"])
            # Runs of earlier versions do not say it.
            on = initial.get("evaluated_on", pilot.measured_on)
        if on != pilot.measured_on:
            how = "give evaluate=..." if on == HELD_OUT else "leave evaluate out"
            raise UserError(
                f"resume: the loss of the run in {str(self.folder.path)!r} is measured on {on}, "
                f"and now on {pilot.measured_on}; {how} as before"
            )

    # --- on the way -----------------------------------------------------------------------

    def step(self, fma: float) -> None:
        self._check_own()
        super().step(fma)

    def event(self, event: Event) -> None:
        super().event(event)
        if event.returned_to is not None:
            self.record.discard_losses_(self._cut_at.get(event.returned_to, event.step))

    def due(self) -> bool:
        return False  # the course alone says when

    def observed(self, losses: list[float]) -> None:
        record, compressor = self.record, self.pilot.compressor
        record.add_losses_(losses, compressor.steps, self.pilot.loss_target)
        record.skipped = self.pilot.skipped

    def interval(self) -> None:
        record, steps, course = self.record, self.pilot.compressor.steps, self.pilot.course
        record.close_interval_(steps)
        record.metric = self.pilot.metric
        step_s, last = self.step_seconds(steps), max(self.pilot.now - 1, 0)
        self.read_clock()
        if self.pilot.compressor.options != self._options:  # chosen by the time of the first steps
            self._write_config()
        if record.loss is not None:
            self.write_row(self.pilot.compressor, course.phase(last), course.rate(last), step_s)

    def save(self, keep: bool, due: bool) -> None:
        self._intervals += 1
        if keep:
            self._cut_at[self.pilot.compressor.steps] = self.record.cut_at
        if keep or self._intervals % _SAVE_EVERY == 0:
            self._save()
        self.start_lap(self.pilot.compressor.steps)

    def ended(self) -> None:
        self._save()

    def _save(self) -> None:
        compressor, memory = self.pilot.compressor, self.pilot.memory
        if not compressor.resume_state.finite():
            return  # the checkpoint before is kept
        wanted = [memory.step_of(name) for name in self.pilot.course.kept_steps()]
        state = {**self.record.to_dict(), **self.pilot.numbers(), "logs": self.folder.sync()}
        checkpoint.save(self.folder.checkpoints, compressor, state, spare=wanted)
        self.folder.saved()

    # --- the end --------------------------------------------------------------------------

    def finished(self, result: Result) -> None:
        self._check_own()
        compressor, record = self.pilot.compressor, self.record
        measured = result.loss if result.metric is None else result.metric
        record.metric = finite(measured)
        self._save()
        outcome = Outcome(
            judged=_judged(result),
            metric=measured,
            figures={},
            evaluated_on=result.measured_on,
            selection_loss=result.loss,
        )
        precision = str(compressor.optimizer.store.weight.dtype).removeprefix("torch.")
        about = About(OWN_LOOP, 0, self.metric_name, self._device, precision)
        held_at = self.pilot.course.held_at
        held_step = None if held_at is None else self.pilot.memory.step_of(held_at)
        numbers = self.pilot.numbers() | {"held_at": held_step}
        found = summary(about, compressor, record, numbers, outcome)
        self.folder.write("summary.json", found | entry_of(found))
        self.folder.close()


def _metric_name(pilot: Pilot) -> str:
    """Without a metric the loss that decides, by the name that reports have for it."""
    if pilot.metric_target is not None:
        return "metric"
    return "held-out loss" if pilot.measured_on == HELD_OUT else f"loss on {pilot.measured_on}"


def _judged(result: Result) -> dict[str, Any]:
    """What was named, the loss, and whether the run has what was named."""
    loss = {"loss": finite(result.loss), "held": result.held}
    if result.metric_target is not None:
        selection = None if result.metric is None else finite(result.metric)
        named = {"loss_target": result.loss_target, "metric_target": result.metric_target}
        return {**named, **loss, "selection_metric": selection}
    work = {"fma_target": result.fma_target} if result.fma_target else {}
    return {"loss_target": result.loss_target, **work, **loss}
