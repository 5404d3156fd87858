"""A saved model in the place of one that is in use: the loop keeps its object."""

from gaugelasso.axes import Compressible
from gaugelasso.compress.model_state import ModelState
from gaugelasso.compress.resume_state import ResumeState
from gaugelasso.errors import UserError
from gaugelasso.runs.checkpoint import Checkpoint


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
