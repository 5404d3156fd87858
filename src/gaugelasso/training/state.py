"""A run's state: model, optimizer, record and driver. Created, saved, resumed, loaded again.

Decides nothing: the driver says where to go back to and when to save.
"""

import gc
import json
from collections.abc import Callable
from typing import Any

import torch

from gaugelasso.axes import Compressible
from gaugelasso.config import Config
from gaugelasso.distributed import Team
from gaugelasso.errors import errors_of
from gaugelasso.runs import checkpoint, logs
from gaugelasso.runs.checkpoint import Checkpoint
from gaugelasso.runs.environment import environment
from gaugelasso.runs.folder import RunFolderBase
from gaugelasso.runs.structures import Structure, check_rebuildable, describe
from gaugelasso.runs.training_work import behind_weights
from gaugelasso.tasks import WithFiles
from gaugelasso.training.records import RunRecord
from gaugelasso.training.resume import (
    check_little_lost,
    check_readable,
    check_same_config,
    check_same_data,
    check_same_profile,
    check_state,
    data_of,
    present_keys,
    warn_changed_code,
)
from gaugelasso.training.run_driver import RunDriver
from gaugelasso.training.saved import RunCheckpoints
from gaugelasso.training.step import TrainingStep
from gaugelasso.training.structure import check_same_structure


class RunState:
    """A new run; with `resume` as the newest checkpoint of the folder has it, if there is one."""

    def __init__(
        self,
        config: Config,
        device: str,
        folder: RunFolderBase,
        team: Team,
        resume: bool,
        new_driver: Callable[["RunState"], RunDriver],
        structure: Structure | None = None,
        new_step: Callable[[Compressible, Config, str, Team], TrainingStep] = TrainingStep,
    ):
        self._structure, self._new_step = structure, new_step
        self.config, self.device, self.folder, self.team = config, device, folder, team
        self.record = RunRecord()
        self.saved = RunCheckpoints(folder, config, device, team)
        self.driver = new_driver(self)
        self._data = data_of(config.task)
        team.check_same(json.dumps(self._data), "by its data")
        found = self.saved.newest() if resume else None
        if found:
            self._resume(found)
        else:
            if resume:
                team.on_rank0(lambda: check_little_lost(folder.path, config.train.checkpoint_every))
            self._begin()
        self.compressor.resume_state.check_same(self.steps, "at the start")

    @property
    def steps(self) -> int:
        return self.compressor.steps

    def _set_model(self, model: Compressible) -> None:
        self.model = model
        self.step = self._new_step(model, self.config, self.device, self.team)
        self.compressor = self.step.compressor

    def _begin(self) -> None:
        config, folder, task = self.config, self.folder, self.config.task
        # Nothing in this package draws from torch's own generators, but a user's task might.
        torch.manual_seed(config.train.seed)
        given, seed = self._structure, config.train.seed
        model = given.build(seed) if given else config.model.build(task, seed)
        check_rebuildable(model)
        self._set_model(model.to(self.device))
        compressor = self.compressor
        self.record.fma_initial = compressor.fma
        self.record.parameters_initial = compressor.parameters
        folder.write("config.json", config.to_dict())
        folder.write("environment.json", self._environment())
        for name, content in task.kept_files().items() if isinstance(task, WithFiles) else ():
            folder.write_bytes(name, content)
        folder.rewind()
        metric = {"name": task.metric_name, "lower_is_better": task.metric_lower_is_better}
        initial = {"metric": metric, "fma": compressor.fma, "widths": compressor.widths}
        initial |= {"costs": compressor.state.costs()}
        initial |= {"data": self._data} if self._data else {}
        # A resumed run need not be given the structure again.
        initial |= {"given_structure": True} if given else {}
        found = given.training_fma if given else None
        initial |= {} if found is None else {"structure_training_fma": found}
        begun = behind_weights(config.weights_from(given is None), config.compress.accounting)
        initial |= {"weights_training_fma": begun} if begun else {}
        folder.write("initial.json", {**initial, **describe(compressor.model)})

    def _resume(self, found: Checkpoint) -> None:
        run = self.folder.path
        self.team.on_rank0(lambda: check_same_config(self.config, run / "config.json"))
        self.team.on_rank0(lambda: check_readable(run))
        self.team.on_rank0(lambda: check_same_data(self._data, run / "initial.json"))
        self.team.on_rank0(lambda: warn_changed_code(self.config, run))
        self.team.on_rank0(lambda: check_same_structure(self._structure, run / "initial.json"))
        self._set_model(found.model(self.device))
        costs = self.compressor.state.costs()
        self.team.on_rank0(lambda: check_same_profile(costs, run / "initial.json"))
        state, tensors = found.state()
        steps = state.pop("steps")
        state = present_keys(state)
        check_state(state, self.numbers(), steps, found.path / "state.json")
        self.record.load_(state)
        with errors_of(found.path / "state.json"):
            self.driver.load_(state)
        with errors_of(found.path / "optimizer.safetensors"):
            self.step.load_state_tensors_(tensors, steps)
        found.restore_random_()
        self.team.on_rank0(lambda: self.folder.rewind(found.marks(), steps))
        self.team.on_rank0(lambda: checkpoint.put_aside_newer(found))
        row = {"step": steps, **self._environment()}
        self.team.on_rank0(lambda: self.folder.append(logs.RESUMED, row))

    def numbers(self) -> dict[str, Any]:
        """What a checkpoint keeps beside tensors and the marks of the logs."""
        return {**self.record.to_dict(), **self.driver.to_dict()}

    def _environment(self) -> dict[str, Any]:
        code = {"code": found} if (found := self.config.code()) else {}
        return {**environment(self.device), "ranks": self.team.size, **code}

    def save(self) -> None:
        """Write a checkpoint. Those that the run may go back to are kept beside the newest."""
        wanted, keep = self.driver.wanted_steps(), self.config.train.checkpoint_keep

        def write() -> None:
            kept = {**self.numbers(), "logs": self.folder.sync()}
            checkpoint.save(self.folder.checkpoints, self.step, kept, keep, wanted)
            self.folder.saved()

        self.team.on_rank0(write)

    def load(self, saved: Checkpoint) -> None:
        """Load an earlier state, to go on from it at the present step of the schedule."""
        steps = self.steps
        hooks, history = self.compressor.hooks, self.compressor.history
        past, tensors = saved.state()
        self.team.on_rank0(lambda: checkpoint.put_aside_newer(saved))
        # Freed before the other is loaded, so that a rollback needs no more memory than training.
        del self.model, self.step, self.compressor
        gc.collect()
        if self.device.startswith("cuda"):
            torch.cuda.empty_cache()
        self._set_model(saved.model(self.device))
        self.step.load_state_tensors_(tensors, steps)
        self.compressor.hooks, self.compressor.history = hooks, history
        self.record.discard_losses_(cut_at=past["cut_at"])

    def where(self) -> str:
        """The place of a failure, for messages."""
        return f"at step {self.steps} (batch seed {self.step.draw(self.steps - 1).seed})"
