"""A run's state: model, optimizer and memory; begun, saved, found again, gone back to.

What training goes on from, whatever brought it there. Decides nothing.
"""

import dataclasses
import gc
import json
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from gaugelasso.compress.events import Event
from gaugelasso.config import Config
from gaugelasso.distributed import Team
from gaugelasso.errors import UserError, errors_of
from gaugelasso.models import Transformer
from gaugelasso.runs import checkpoint, logs
from gaugelasso.runs.environment import environment
from gaugelasso.runs.folder import RunFolderBase
from gaugelasso.training import watch
from gaugelasso.training.memory import Memory, present_keys
from gaugelasso.training.resume import (
    check_little_lost,
    check_readable,
    check_same_config,
    check_same_data,
    check_state,
    data_of,
)
from gaugelasso.training.step import TrainingStep

_logger = logging.getLogger(__name__)


class RunState:
    """As it begins, or with `resume` as the newest checkpoint of the folder has it, if any."""

    def __init__(
        self, config: Config, device: str, folder: RunFolderBase, team: Team, resume: bool
    ):
        self.config, self.device, self.folder, self.team = config, device, folder, team
        self.memory = Memory()
        # Steps that were not taken, as of the last look: in a row up to it, most in a row.
        self.failing = self.streak = 0
        self._data = data_of(config.task)
        team.check_same(json.dumps(self._data), "by its data")
        found = self._found(lambda: checkpoint.find(folder.checkpoints)) if resume else None
        if found:
            self._resume(found)
        else:
            if resume:
                team.on_rank0(lambda: check_little_lost(folder.path, config.train.checkpoint_every))
            self._begin()
        self.compressor.check_same("at the start")

    @property
    def steps(self) -> int:
        return self.compressor.steps

    def _take_up(self, model: Transformer) -> None:
        self.model = model
        self.step = TrainingStep(model, self.config, self.device, self.team)
        self.compressor = self.step.compressor

    def _begin(self) -> None:
        config, folder, task = self.config, self.folder, self.config.task
        # Nothing here draws from torch's own generators, but a task of somebody's might.
        torch.manual_seed(config.train.seed)
        spec = config.model.spec(task)
        self._take_up(Transformer(spec, config.train.seed).to(self.device))
        compressor = self.compressor
        self.memory.fma_initial = compressor.fma
        self.memory.parameters_initial = compressor.parameters
        folder.write("config.json", config.to_dict())
        folder.write("environment.json", self._around())
        folder.rewind()
        metric = {"name": task.metric_name, "lower_is_better": task.metric_lower_is_better}
        initial = {"metric": metric, "fma": compressor.fma, "widths": compressor.widths}
        initial |= {"data": self._data} if self._data else {}
        folder.write("initial.json", {**initial, "structure": compressor.structure})

    def _resume(self, found: checkpoint.Checkpoint) -> None:
        run = self.folder.path
        self.team.on_rank0(lambda: check_same_config(self.config, run / "config.json"))
        self.team.on_rank0(lambda: check_readable(run))
        self.team.on_rank0(lambda: check_same_data(self._data, run / "initial.json"))
        self._take_up(found.model(self.device))
        state, tensors = found.state()
        steps = state.pop("steps")
        state = present_keys(state)
        check_state(state, dataclasses.asdict(Memory()), steps, found.path / "state.json")
        self.memory = Memory(**state)
        with errors_of(found.path / "optimizer.safetensors"):
            self.compressor.load_state_tensors_(tensors, steps)
        found.restore_random_()
        self.team.on_rank0(lambda: self.folder.rewind(found.marks(), steps))
        self.team.on_rank0(lambda: checkpoint.put_aside_newer(found))
        row = {"step": steps, **self._around()}
        self.team.on_rank0(lambda: self.folder.append(logs.RESUMED, row))

    def _around(self) -> dict[str, Any]:
        return {**environment(self.device), "ranks": self.team.size}

    def first_intact(self, steps: Iterable[int]) -> checkpoint.Checkpoint | None:
        """Of the checkpoints of these steps the first that is whole."""
        return self._found(lambda: self._first_intact(steps))

    def newest(self) -> checkpoint.Checkpoint | None:
        """The newest whole checkpoint."""
        return self._found(lambda: checkpoint.find(self.folder.checkpoints))

    def _first_intact(self, steps: Iterable[int]) -> checkpoint.Checkpoint | None:
        for step in steps:
            try:
                return checkpoint.at_step(self.folder.checkpoints, step)
            except UserError as error:
                _logger.warning("warning: %s; it was to be gone back to, but is no more", error)
        return None

    def _found(
        self, look: Callable[[], checkpoint.Checkpoint | None]
    ) -> checkpoint.Checkpoint | None:
        """What rank 0 finds, for all."""
        told = self.team.on_rank0(lambda: (f := look()) and (f.path.name, f.step))
        return checkpoint.Checkpoint(self.folder.checkpoints / told[0], told[1]) if told else None

    def save(self) -> None:
        """Write a checkpoint; those that the run may want to go back to stay besides."""
        memory, keep = self.memory, self.config.train.checkpoint_keep
        wanted = memory.pending_step, memory.fallback_step, *memory.held

        def write() -> None:
            kept = {**dataclasses.asdict(memory), "logs": self.folder.sync()}
            spare = [step for step in wanted if step is not None]
            checkpoint.save(self.folder.checkpoints, self.compressor, kept, keep, spare)
            self.folder.saved()

        self.team.on_rank0(write)

    def roll_back(self, to: checkpoint.Checkpoint, why: str) -> None:
        """Take up an earlier state and go on from it, at the step that training has come to."""
        began, memory, steps = time.perf_counter(), self.memory, self.steps
        hooks, history = self.compressor.hooks, self.compressor.history
        fma = self.compressor.fma
        past, tensors = to.state()
        self.team.on_rank0(lambda: checkpoint.put_aside_newer(to))
        # Gone before the other comes, so that no more memory is taken than in training.
        del self.model, self.step, self.compressor
        gc.collect()
        if self.device.startswith("cuda"):
            torch.cuda.empty_cache()
        self._take_up(to.model(self.device))
        compressor = self.compressor
        compressor.load_state_tensors_(tensors, steps)
        compressor.hooks, compressor.history = hooks, history
        compressor.scalars.recount_(memory.skipped)
        self.failing = self.streak = 0
        watch.returned_(memory, to.step)
        memory.cut_at = past["cut_at"]
        spent = time.perf_counter() - began
        event = Event.returned(steps, to.step, fma, compressor.fma, compressor.widths, spent)
        history.append(event)
        self.folder.append("events.jsonl", event.to_dict())
        compressor.check_same(f"back at the state of step {to.step}")
        _logger.warning("warning: %s; back to the state of step %d", why, to.step)
