"""The checkpoints of a run. Rank 0 searches the disk, and all ranks get the same result."""

import logging
from collections.abc import Callable, Iterable

from gaugelasso.config import Config
from gaugelasso.distributed import Team
from gaugelasso.errors import UserError
from gaugelasso.runs import checkpoint
from gaugelasso.runs.checkpoint import Checkpoint
from gaugelasso.runs.folder import RunFolderBase
from gaugelasso.tasks import SELECTION
from gaugelasso.training.evaluation import HeldOut, final_evaluation

_logger = logging.getLogger(__name__)


class RunCheckpoints:
    """Finds checkpoints and measures their models; loads nothing into the run."""

    def __init__(self, folder: RunFolderBase, config: Config, device: str, team: Team):
        self._home = folder.checkpoints
        self._config, self._device, self._team = config, device, team

    def first_intact(self, steps: Iterable[int]) -> Checkpoint | None:
        """The first of these steps' checkpoints that is there and undamaged."""
        return self._found(lambda: self._first_intact(steps))

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint that is undamaged."""
        return self._found(lambda: checkpoint.find(self._home))

    def measured(self, saved: Checkpoint) -> HeldOut:
        """Loss and metric of a saved model on the data that decide."""
        model = saved.model(self._device)
        return final_evaluation(model, self._config, self._device, self._team, SELECTION)

    def selection_loss(self, saved: Checkpoint) -> float:
        """The loss of a saved model on the data that decide."""
        return self.measured(saved).loss

    def _first_intact(self, steps: Iterable[int]) -> Checkpoint | None:
        for step in steps:
            try:
                return checkpoint.at_step(self._home, step)
            except UserError as error:
                _logger.warning("warning: %s; the run cannot go back to it", error)
        return None

    def _found(self, look: Callable[[], Checkpoint | None]) -> Checkpoint | None:
        found = self._team.on_rank0(lambda: (saved := look()) and (saved.path.name, saved.step))
        return Checkpoint(self._home / found[0], found[1]) if found else None
