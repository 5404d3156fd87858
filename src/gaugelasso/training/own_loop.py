"""Records a run in a loop of the user's own: the same run folder as the trainer's.

`info` and `report` read it as any other. `eval` and `bench` need data, which an own loop does not
describe: give them a task with --set task.module=FILE:NAME. Decides nothing.
"""

import dataclasses
import os
import time
from pathlib import Path
from typing import Any

from gaugelasso.axes import Compressible
from gaugelasso.compress.drop import next_to_go
from gaugelasso.compress.events import Event
from gaugelasso.compress.model_state import ModelState
from gaugelasso.compress.pilot import Pilot
from gaugelasso.compress.result import Result
from gaugelasso.compress.resume_state import ResumeState
from gaugelasso.errors import UserError, errors_of
from gaugelasso.runs import checkpoint, logs
from gaugelasso.runs.checkpoint import Checkpoint
from gaugelasso.runs.environment import environment
from gaugelasso.runs.folder import RunFolder
from gaugelasso.runs.reading import read_json
from gaugelasso.runs.structures import describe
from gaugelasso.training.records import RunRecord, finite, metrics_row

# The course advances about a hundred times in a run; a checkpoint is due every so many times.
_SAVE_EVERY = 10
METRIC = "held-out loss"


class RunRecorder:
    """Writes the run folder `path`; with `resume`, goes on with the run that is in it."""

    def __init__(self, path: str | os.PathLike[str], resume: bool = False):
        self.folder = RunFolder.open(Path(path), "resume" if resume else "refuse")
        self.record = RunRecord()
        self._found = checkpoint.find(self.folder.checkpoints) if resume else None
        self._advances = 0
        self._began = self._mark = time.perf_counter()
        self._marked_step = 0

    # --- the start ------------------------------------------------------------------------

    def prepare(self, model: Compressible) -> None:
        """Give the model the structure and weights of the newest checkpoint."""
        if self._found is not None:
            device = next(model.parameters()).device
            transplant_(self._found.model(str(device)), model)

    def begin(self, pilot: Pilot) -> None:
        self.pilot, compressor = pilot, pilot.compressor
        self._device = str(compressor.optimizer.store.weight.device)
        if self._found is not None:
            self._resume(self._found)
            return
        self.record.fma_initial = compressor.fma
        self.record.parameters_initial = compressor.parameters
        self.folder.write("config.json", self._config())
        self.folder.write("environment.json", environment(self._device))
        self.folder.rewind()
        reach = pilot.metric_target
        direction = {"lower_is_better": reach is None or reach.lower_is_better}
        initial = {
            "metric": {"name": self._metric_name, **direction},
            "fma": compressor.fma,
            "widths": compressor.widths,
        }
        self.folder.write("initial.json", {**initial, **describe(compressor.model)})

    @property
    def _metric_name(self) -> str:
        return METRIC if self.pilot.metric_target is None else "metric"

    def _config(self) -> dict[str, Any]:
        """What the loop has of a config: no task, and the model as initial.json describes it."""
        compressor, course = self.pilot.compressor, self.pilot.course
        reach, work = self.pilot.metric_target, {"fma": compressor.fma_target}
        metric = {} if reach is None else {"metric": reach.value}
        return {
            "task": {"name": "own loop"},
            "model": {},
            "target": {"loss": self.pilot.loss_target, **metric, "hold": "final", **work},
            "compress": dataclasses.asdict(compressor.options),
            "train": {"seed": 0, "steps": course.steps, "eval_every": course.grain},
        }

    def _resume(self, found: Checkpoint) -> None:
        path, pilot, compressor = found.path / "state.json", self.pilot, self.pilot.compressor
        before, now = read_json(self.folder.path / "config.json"), self._config()
        for section in ("target", "compress", "train"):
            for key, value in now[section].items():
                if (old := before.get(section, {}).get(key)) != value:
                    raise UserError(
                        f"resume: {section}.{key} = {value!r}, but the run in "
                        f"{str(self.folder.path)!r} began with {old!r}; keep its setting"
                    )
        state, tensors = found.state()
        steps = state.pop("steps")
        with errors_of(path):
            self.record.load_(state)
            pilot.course.load_(state["course"])
        with errors_of(found.path / "optimizer.safetensors"):
            compressor.load_state_tensors_(tensors, steps)
        compressor.fma_initial = self.record.fma_initial
        pilot.parameters_initial = self.record.parameters_initial
        pilot.metric = self.record.metric if pilot.metric_target is not None else None
        found.restore_random_()
        for name in pilot.course.kept_steps():
            pilot.kept[name] = DiskState(checkpoint.at_step(self.folder.checkpoints, name))
        self.folder.rewind(found.marks(), steps)
        self._began -= self.record.wall_s
        self._marked_step = steps
        self.folder.append(logs.RESUMED, {"step": steps, **environment(self._device)})

    # --- on the way -----------------------------------------------------------------------

    def event(self, event: Event) -> None:
        self.folder.append("events.jsonl", event.to_dict())
        if event.dropped or event.returned_to is not None:
            self.record.cut_at = event.step

    def kept(self, name: int) -> None:
        self._save()

    def advanced(self, losses: list[float]) -> None:
        record, compressor, course = self.record, self.pilot.compressor, self.pilot.course
        record.add_losses_(losses, compressor.steps, self.pilot.loss_target)
        record.training_fma += compressor.fma * len(losses)
        record.skipped = int(compressor.skipped)
        record.close_interval_(compressor.steps)
        now = time.perf_counter()
        step_s = (now - self._mark) / max(compressor.steps - self._marked_step, 1)
        record.wall_s, self._mark, self._marked_step = now - self._began, now, compressor.steps
        if record.loss is not None:
            step = self.pilot.now
            name, record.metric = self._metric_name, self.pilot.metric
            phase, lr = course.phase(max(step - 1, 0)), course.rate(max(step - 1, 0))
            row = metrics_row(compressor, compressor.model, record, name, phase, lr, step_s)
            self.folder.append("metrics.jsonl", row)
        self._advances += 1
        if self._advances % _SAVE_EVERY == 0:
            self._save()

    def _save(self) -> None:
        course, compressor = self.pilot.course, self.pilot.compressor
        if not compressor.resume_state.finite():
            return  # the checkpoint before is kept
        state = {**self.record.to_dict(), "course": course.to_dict(), "logs": self.folder.sync()}
        checkpoint.save(self.folder.checkpoints, compressor, state, spare=course.kept_steps())
        self.folder.saved()

    # --- the end --------------------------------------------------------------------------

    def finished(self, result: Result) -> None:
        compressor, record, course = self.pilot.compressor, self.record, self.pilot.course
        measured = result.loss if result.metric is None else result.metric
        record.metric = finite(measured)
        self._save()
        self.folder.write(
            "summary.json",
            {
                "task": "own loop",
                "seed": 0,
                "steps": result.steps,
                "accounting": compressor.options.accounting,
                "fma_initial": result.fma_initial,
                "fma_final": result.fma,
                "compression": result.compression if result.fma else None,
                "loss_target": result.loss_target,
                **_other_targets(result),
                "loss": finite(result.loss),
                "held": result.held,
                "metric": {"name": self._metric_name, "value": finite(measured)},
                "figures": {},
                "evaluated_on": result.measured_on,
                "selection_loss": finite(result.loss),
                "target_reached_step": record.reached_at,
                "structure_step": record.cut_at,
                "held_step": course.held_at,
                "returns": sum(e.returned_to is not None for e in compressor.history),
                "skipped_steps": record.skipped,
                "training_fma": record.training_fma,
                "parameters_initial": result.parameters_initial,
                "parameters_final": result.parameters,
                "wall_s": record.wall_s,
                "device": self._device,
                "widths": result.widths,
                "next_to_go": next_to_go(
                    compressor.state.table, compressor.utility(), compressor.prices
                ),
                **describe(compressor.model),
            },
        )
        self.folder.close()


def _other_targets(result: Result) -> dict[str, Any]:
    """What a summary has where no loss is named."""
    if result.metric_target is not None:
        selection = None if result.metric is None else finite(result.metric)
        return {"metric_target": result.metric_target, "selection_metric": selection}
    return {} if result.loss_target is not None else {"fma_target": result.fma_target}


class DiskState:
    """A kept state in a checkpoint, for a run that was resumed."""

    def __init__(self, saved: Checkpoint):
        self._saved = saved

    def load_(self, state: ModelState, resume_state: ResumeState) -> None:
        device = str(state.plan.store.weight.device)
        transplant_(self._saved.model(device), state.model)
        state.replaced_()
        resume_state.load_(self._saved.state()[1])


def transplant_(source: Compressible, target: Compressible) -> None:
    """Make a model equal to another of its class, without a new object for it."""
    if type(source) is not type(target):
        raise UserError(
            f"resume: the run is of a {type(source).__name__}, not of a {type(target).__name__}"
        )
    training = target.training
    target.__dict__.clear()
    target.__dict__.update(source.__dict__)
    target.train(training)
