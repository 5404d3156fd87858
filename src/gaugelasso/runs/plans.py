"""Which command began a run, by the plan in its folder."""

from pathlib import Path

from gaugelasso.errors import UserError

# The plan of a command that begins with the model of another run. The config does not name it.
PLANS = {"prune": "prune.json", "cofi": "cofi.json", "torch-pruning": "torch-pruning.json"}


def check_begun_by(path: Path, command: str, has_checkpoint: bool) -> None:
    """UserError if another command began the run in a folder: it must go on with it too.

    A run that was killed before its first checkpoint may have no plan yet.
    """
    own, wrong = PLANS.get(command), ""
    if own is not None and (path / own).exists():
        return
    for other, file in PLANS.items():
        if (path / file).exists():
            wrong = f"has {file}, so that `gaugelasso {other}` began it"
    if own is not None and not wrong and has_checkpoint:
        wrong = f"has no {own}, so that another command began it"
    if wrong:
        raise UserError(
            f"--resume: the run in {str(path)!r} {wrong}; go on with that command, or choose "
            "another --out"
        )
