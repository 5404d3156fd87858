"""The trainer: one run from its configuration to its summary.

Takes the steps and evaluates on held-out data. The order of what is done around a step is the
driver's, as in a loop of the user's own. Decides nothing about structure.
"""

import contextlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch

from gaugelasso.axes import Compressible
from gaugelasso.compress.compressor import Compressor
from gaugelasso.compress.courses.window import Measured
from gaugelasso.compress.events import Event
from gaugelasso.compress.result import TargetMissed
from gaugelasso.config import Config
from gaugelasso.distributed import ALONE, Team
from gaugelasso.runs.folder import Existing, ReadOnlyRunFolder, RunFolder, RunFolderBase
from gaugelasso.runs.plans import check_begun_by
from gaugelasso.runs.reading import read_json
from gaugelasso.runs.structures import Structure
from gaugelasso.runs.training_work import entry_of
from gaugelasso.runs.writing import check_name
from gaugelasso.signals import StopRequest, stop_requests
from gaugelasso.tasks import SELECTION, TEST
from gaugelasso.training.course_run import CourseRun
from gaugelasso.training.evaluation import (
    HeldOut,
    choose_device,
    configure_cpu_,
    evaluate,
    final_evaluation,
    samples,
)
from gaugelasso.training.missed import missed_message
from gaugelasso.training.opening import (
    check_base,
    check_data,
    check_memory,
    check_metric,
    check_named,
    check_own_model,
    check_work_named,
    memory_errors_named,
)
from gaugelasso.training.pressed_run import PressedRun
from gaugelasso.training.records import (
    Progress,
    RunRecord,
    about_run,
    outcome_of,
    summary,
)
from gaugelasso.training.reference_file import reference_entry
from gaugelasso.training.run_driver import RunDriver
from gaugelasso.training.run_log import RunLog
from gaugelasso.training.state import RunState
from gaugelasso.training.step import TrainingStep, microbatches_of
from gaugelasso.training.structure import check_fits


class Trainer:
    """Build with a config and a folder, then `run()`. `structure` replaces that of [model]."""

    command: ClassVar[str] = "train"  # which resumes a run of this trainer

    def __init__(
        self,
        config: Config,
        out: Path,
        existing: Existing = "refuse",
        on_progress: Callable[[Progress], None] | None = None,
        team: Team = ALONE,
        structure: Structure | None = None,
    ):
        self.config, self.train, self.task, self.team = config, config.train, config.task, team
        check_named(config)
        check_metric(config)
        check_fits(config, structure)
        microbatches_of(config, team)  # refuses a number that the ranks cannot share equally
        team.check_same(json.dumps(config.to_dict()), "by its config")
        self.device = choose_device(self.train.device, team.local)
        configure_cpu_(config, self.device)
        self.on_progress = on_progress
        self.folder: RunFolderBase = ReadOnlyRunFolder(out)
        self._made = False
        team.on_rank0(lambda: self._open(existing, structure))
        with contextlib.ExitStack() as on_failure, memory_errors_named(config):
            on_failure.callback(self._abandon)
            resume, device = existing == "resume", self.device
            made, step = self._new_driver, self._new_step
            self.state = RunState(config, device, self.folder, team, resume, made, structure, step)
            on_failure.pop_all()

    def _open(self, existing: Existing, structure: Structure | None) -> None:
        # First of all: unreadable data must not cost a run that is in the folder already.
        check_memory(self.config, self.device, existing, structure)
        check_data(self.config, self.device)
        check_own_model(self.config, existing, structure)
        check_base(self.config, self.folder.path, existing, structure)
        check_work_named(self.config, self.device, existing, structure)
        check_name(self.folder.path)
        if existing == "resume":
            has_checkpoint = any(self.folder.checkpoints.glob("*"))
            check_begun_by(self.folder.path, self.command, has_checkpoint)
        self._made = not self.folder.path.exists()
        self.folder = RunFolder.open(self.folder.path, existing)

    def _abandon(self) -> None:
        """Release the folder, and remove it if nothing was written to one that is new."""
        self.folder.close()
        if self._made:
            with contextlib.suppress(OSError):  # something is in it
                self.folder.path.rmdir()

    @property
    def model(self) -> Compressible:
        return self.state.model

    @property
    def compressor(self) -> Compressor:
        return self.state.compressor

    @property
    def record(self) -> RunRecord:
        return self.state.record

    @property
    def driver(self) -> RunDriver:
        return self.state.driver

    def _new_step(
        self, model: Compressible, config: Config, device: str, team: Team
    ) -> TrainingStep:
        return TrainingStep(model, config, device, team)

    def _new_driver(self, state: RunState) -> RunDriver:
        self.log = RunLog(state, self.evaluate, self.on_progress)
        if self.config.target.hold == "final":
            return CourseRun(state, self._measured, self.log)
        return PressedRun(state, self.log)

    # --- the run ------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """Train to the end; returns the summary that is also in the folder.

        On SIGTERM or Ctrl-C it saves and raises Stopped.
        """
        self.team.clear_stop()
        with contextlib.closing(self.folder), stop_requests() as request:
            while True:
                self._train(request)
                with self._interruptible(request):
                    held_out = self._final(SELECTION)
                    go_back = self.driver.at_end(Measured(held_out.loss, held_out.metric))
                    summary = {} if go_back else self._summary(held_out)
                if go_back is None:
                    return self._finish(summary)
                self.folder.reopen()
                go_back()

    def _interruptible(self, request: StopRequest) -> contextlib.AbstractContextManager[None]:
        """Around an evaluation: it may be interrupted, unless other ranks wait in a collective."""
        if self.team.size > 1:
            return contextlib.nullcontext()
        return request.interruptible(self._resumable_message())

    def _train(self, request: StopRequest) -> None:
        self.log.start_clock(self.compressor.steps)
        while self.compressor.steps < self.driver.end:
            self._step()
            self.log.stopping = self._is_stopping(request)
            self.driver.advance(self.log.stopping)
            if self.log.stopping:
                raise request.stopped(self._resumable_message())

    def _step(self) -> Event | None:
        self.driver.before_step()
        self.state.step.load_(self.compressor.steps)
        self.state.step()
        loss = self.state.step.loss.clone()
        event = self.compressor.finish_step_()
        self.driver.note_step(loss, event)
        return event

    def _measured(self, thorough: bool) -> Measured:
        """On all selection data of the final evaluation, or on half of them."""
        return self.evaluate(math.ceil(self.train.final_batches / (1 if thorough else 2)))

    def evaluate(self, batches: int) -> Measured:
        """Mean loss and metric on selection data."""
        measured = evaluate(self.model, self.config, batches, self.device, self.team)
        self.model.train()
        if self.device.startswith("cuda"):  # what is left in use is what training needs
            torch.cuda.empty_cache()
        return measured

    # --- stops ----------------------------------------------------------------------

    def _is_stopping(self, request: StopRequest) -> bool:
        """Whether to stop after this step. Every rank decides alike, one exchange later.

        On a GPU the flag is read only where the host waits for the device anyway.
        """
        if self.team.size == 1:
            return request.asked
        known = self.device == "cpu" or self.log.is_due("log")
        stopping = known and self.team.stop_requested
        if request.asked:
            self.team.request_stop()  # exchanged with the next step
        return stopping

    def _resumable_message(self) -> str:
        return (
            f"after step {self.compressor.steps}, which is saved in "
            f"{str(self.folder.checkpoints)!r}; go on with --resume"
        )

    # --- the summary ----------------------------------------------------------------

    def _final(self, stream: int) -> HeldOut:
        return final_evaluation(self.model, self.config, self.device, self.team, stream)

    def _summary(self, selection: HeldOut) -> dict[str, Any]:
        config, compressor = self.config, self.compressor
        outcome = outcome_of(config, compressor, self._final(TEST), selection)
        initial = read_json(self.folder.path / "initial.json")
        given = bool(initial.get("given_structure"))
        about, numbers = about_run(config, self.device, given), self.driver.to_dict()
        found = summary(about, compressor, self.record, numbers, outcome)
        found |= reference_entry(config, self.folder.path)
        return found | entry_of(
            found, initial.get("structure_training_fma"), initial.get("weights_training_fma")
        )

    def _finish(self, summary: dict[str, Any]) -> dict[str, Any]:
        if shown := samples(self.model, self.config, self.device):
            self.folder.write_arrays("samples.npz", shown)
        self.folder.write("summary.json", summary)
        if not summary["held"] and self.driver.is_missed(self.record):
            where, lower = str(self.folder.checkpoints), self.config.task.metric_lower_is_better
            raise TargetMissed(missed_message(self.record, summary, where, lower))
        return summary
