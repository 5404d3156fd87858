"""Plain training with the settings of a run: no pressure, warm-up and one anneal."""

# Every loss is within it. A run that misses its target goes back and anneals again, and plain
# training has the run's number of steps and no more.
_ANY_LOSS = "1e30"


def plain_changes(steps: int, warmup: int, cooldown: int) -> dict[str, str | None]:
    """The changes of a config that make it one of plain training; None removes a key."""
    return {
        "target.loss": _ANY_LOSS,
        "target.metric": None,
        "target.hold": "pressed",  # the plain schedule: no trial anneals, no returns
        "target.fma": "0.0",
        "compress.solver": "fixed",
        "compress.rho": "0.0",
        "train.steps": str(steps),
        "train.warmup": str(min(warmup, steps)),
        "train.cooldown": str(min(cooldown, steps - min(warmup, steps))),
        "train.saturation": "0",
    }
