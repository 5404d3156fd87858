"""Checks of a structure that a run begins with in place of the model of its config."""

from pathlib import Path

from gaugelasso.config import Config
from gaugelasso.config.base import BaseModel
from gaugelasso.config.model import ModelConfig
from gaugelasso.errors import UserError
from gaugelasso.runs.structures import Structure
from gaugelasso.tasks.own import sequences

# The parts of a transformer's structure that the task decides.
_OF_TASK = ("length", "inputs", "outputs", "input_kind", "causal")


def check_fits(config: Config, structure: Structure | None) -> None:
    """UserError if a structure is given that is not one of this config's model and task."""
    if structure is None:
        return
    built_in = isinstance(config.model, ModelConfig | BaseModel)
    if built_in == bool(structure.model_class):
        there = structure.model_class or "the built-in transformer"
        raise UserError(
            f"--structure {str(structure.path)!r} is of {there!r}, and [model] of the config names "
            f"{'the built-in transformer' if built_in else 'a model of its own'}; give both alike"
        )
    if not isinstance(config.model, ModelConfig | BaseModel):
        return
    wanted, spec = sequences(config.task), structure.spec()
    context = config.model.context if isinstance(config.model, BaseModel) else wanted.length
    for name in _OF_TASK:
        here = context if name == "length" else getattr(wanted, name)
        there = getattr(spec, name)
        if here != there:
            raise UserError(
                f"--structure: its {name} is {there!r}, and task {config.task_name!r} needs "
                f"{here!r}; take the structure of a run of the same task"
            )


def check_same_structure(structure: Structure | None, path: Path) -> None:
    """UserError if a structure is given and the run began with another, that in this file."""
    if structure is not None and not structure.builds_same(Structure.read(path)):
        raise UserError(
            f"--resume: --structure is not what the run began with ({str(path)!r}); "
            "give the structure it began with, or start another run"
        )
