"""Polynomial divisions, as the tests of their task draw them."""

from pathlib import Path

from gaugelasso.tasks import FF31, SELECTION, TEST, TRAINING, Draw

ROOT = Path(__file__).parents[2]
PAPER = FF31()
SMALL = FF31(modulus=5, degree=2)
TASKS_HERE = [PAPER, SMALL, FF31(7, 1), FF31(2, 1)]
HELD_OUT = Draw(1, 0, SELECTION)
STREAMS = (TRAINING, SELECTION, TEST)


def drawn(task: FF31, size: int, draw: Draw) -> list[list[int]]:
    return task.batch(size, draw, "cpu")[0].tolist()
