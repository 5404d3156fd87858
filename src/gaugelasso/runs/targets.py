"""The loss target of a run that names no loss: a number that every loss is within."""

# A config has a loss target where nothing else is named. Plain training, and a method that judges
# its model by something else, write this one.
ANY_LOSS = 1e30


def named_loss(target: float | None) -> float | None:
    """A loss target as a reader should see it; None if there is none."""
    return None if target is None or target >= ANY_LOSS else target
