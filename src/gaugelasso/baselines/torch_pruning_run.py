"""A run of torch-pruning, from its options to its summary.

The rounds are those of post-hoc pruning (`post_hoc`), without balance; the package decides what
each removes. In group-norm mode, steps with the package's regularisation come before them.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gaugelasso.axes import Compressible
from gaugelasso.baselines.post_hoc import PrunePlan, PruneRun
from gaugelasso.baselines.pruning import PruneTrainer, check_work, pruning_config
from gaugelasso.baselines.source import Source, transformer_of
from gaugelasso.baselines.torch_pruning_choice import (
    GroupNormRegularizer,
    PackageChoice,
    PrunerOptions,
    package,
)
from gaugelasso.compress.courses.window import Measured
from gaugelasso.compress.drop import Decision
from gaugelasso.config import Config
from gaugelasso.config.plain import BALANCE_KEYS
from gaugelasso.distributed import Team
from gaugelasso.models import Transformer
from gaugelasso.runs.folder import Existing
from gaugelasso.training.records import Progress
from gaugelasso.training.run_log import RunLog
from gaugelasso.training.state import RunState
from gaugelasso.training.step import TrainingStep


@dataclass(frozen=True)
class TorchPruningPlan(PrunePlan):
    """Rounds to a work per token, after `sparse` steps with regularisation."""

    sparse: int
    options: PrunerOptions

    @property
    def steps(self) -> int:
        return self.sparse + super().steps

    def to_dict(self) -> dict[str, Any]:
        own = {key: getattr(self, key) for key in ("sparse", "rounds", "corrective", "finetune")}
        return {"fma": self.fma, **asdict(self.options), **own}


def torch_pruning_settings(
    source: Source, plan: TorchPruningPlan, changes: Mapping[str, str]
) -> Config:
    """The config of a run; UserError if the package is missing or cannot reach the work."""
    package()
    transformer_of(source.run, "torch-pruning has plain modules for")
    config = pruning_config(source, plan, changes, "torch-pruning", BALANCE_KEYS)
    check_work(
        source, plan, config,
        lambda state, work: state.work_after(PackageChoice(state, plan.options).to_work(work)),
    )  # fmt: skip
    return config


class RegularizedStep(TrainingStep):
    """While `regularizer` is set, a step adds its gradient to that of the loss.

    The package reads values back to the host, so no CUDA graph can capture it. Its gradient
    depends on the weights alone: it is computed before the step, into fixed tensors.
    """

    _regularizer: GroupNormRegularizer | None = None

    @property
    def regularizer(self) -> GroupNormRegularizer | None:
        return self._regularizer

    @regularizer.setter
    def regularizer(self, regularizer: GroupNormRegularizer | None) -> None:
        if regularizer is self._regularizer:
            return
        self._regularizer = regularizer
        self._added: dict[str, Tensor] = {}
        self._step.reset()  # a CUDA graph has the addresses of the gradients before

    def __call__(self) -> None:
        if self.regularizer is not None:
            assert isinstance(self.model, Transformer)
            found = self.regularizer.gradients(self.model)
            if self._added:
                torch._foreach_copy_(list(self._added.values()), list(found.values()))
            else:
                self._added = {name: gradient.clone() for name, gradient in found.items()}
        super().__call__()

    def add_gradients_(self, share: float) -> None:
        if self.regularizer is not None:
            for name, added in self._added.items():
                gradient = self.model.get_parameter(name).grad
                assert gradient is not None
                gradient.add_(added, alpha=share)


class TorchPruningRun(PruneRun):
    """Regularised steps at the full learning rate, then the rounds."""

    ranks_balanced = False

    def __init__(
        self, state: RunState, log: RunLog, plan: TorchPruningPlan, measure: Callable[[], Measured]
    ):
        super().__init__(state, log, plan, measure)
        self._sparse, self._options = plan.sparse, plan.options

    def rate(self, step: int) -> float:
        return self.state.config.compress.lr if step < self._sparse else super().rate(step)

    @property
    def round_due(self) -> bool:
        return self.now >= self._sparse and super().round_due

    def before_step(self) -> None:
        step, model = self.state.step, self.state.model
        assert isinstance(step, RegularizedStep)
        assert isinstance(model, Transformer)
        if self.now >= self._sparse:
            step.regularizer = None
        elif step.regularizer is None:  # at the start, and after a return to a checkpoint
            step.regularizer = GroupNormRegularizer(model, self._options)
        super().before_step()

    def drops_to(self, work: float) -> Decision:
        return PackageChoice(self.compressor.state, self._options).to_work(work)


class TorchPruningTrainer(PruneTrainer):
    """Prunes the model of `source` with the package torch-pruning."""

    command = "torch-pruning"

    def __init__(
        self,
        source: Source,
        plan: TorchPruningPlan,
        config: Config,
        out: Path,
        existing: Existing = "refuse",
        on_progress: Callable[[Progress], None] | None = None,
    ):
        self.method, self._whole = f"torch-pruning-{plan.options.mode}", plan
        super().__init__(source, plan, config, out, existing, on_progress)

    def _new_step(
        self, model: Compressible, config: Config, device: str, team: Team
    ) -> RegularizedStep:
        return RegularizedStep(model, config, device, team, self.first_batch)

    def new_run(self, state: RunState, measure: Callable[[], Measured]) -> TorchPruningRun:
        return TorchPruningRun(state, self.log, self._whole, measure)

    def outcome(self) -> dict[str, Any]:
        found = {"rounds_made": self.pruning.rounds, "version": version("torch-pruning")}
        return {"torch_pruning": {**self.plan.to_dict(), **found}}
