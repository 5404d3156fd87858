"""A found structure, trained from scratch: new weights, no pressure, one run for each seed.

`retrain` trains only this; a baseline trains it beside uniform models.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gaugelasso.errors import UserError
from gaugelasso.runs.structures import MODEL_CLASS, STRUCTURE
from gaugelasso.runs.training_work import TRAINING_WORK, total_training
from gaugelasso.sweeps.arms import Arm


def from_scratch(name: str, structure: Path, folder: Path) -> Arm:
    """Return the arm whose runs begin with the structure of this file and new weights."""
    return Arm(name, (), folder, ("--structure", str(structure)))


def found_structure(run: Path, summary: Mapping[str, Any]) -> Any:
    """Return the structure that a run ended with, as the content of a file of its own.

    It says how much training was behind it, which the runs from scratch add to their own.
    """
    if STRUCTURE not in summary:
        raise UserError(f"{str(run / 'summary.json')!r}: no structure; train the run again")
    found = {key: summary[key] for key in (MODEL_CLASS, STRUCTURE) if key in summary}
    return {**found, TRAINING_WORK: {"total": total_training(summary)}}
