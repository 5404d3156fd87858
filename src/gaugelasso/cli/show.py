"""Prints how a run's model solves a polynomial division, each step marked right or wrong.

The model is given the problem only and continues with its own output, so an error affects later
steps.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from gaugelasso.config import run_config
from gaugelasso.errors import UserError
from gaugelasso.runs import checkpoint
from gaugelasso.tasks import FF31, SELECTION, Draw
from gaugelasso.tasks.division_grammar import Grammar
from gaugelasso.training.evaluation import predictor

RIGHT, WRONG = "✓", "✗"


def show_divisions(run: Path, problems: int, seed: int, device: str) -> Iterator[str]:
    """Lines of text about the first held-out problems of a seed, solved by the run's model."""
    config = run_config(run)
    task = config.task
    if not isinstance(task, FF31):
        raise UserError(
            f"{str(run)!r} is a run of the task {config.task_name!r}; show needs a run of 'ff31'"
        )
    model = checkpoint.load_model(run, device)
    tokens, _ = task.batch(problems, Draw(seed, 0, SELECTION), device)
    written = task.solve(predictor(model, config, device), tokens).tolist()
    solved = 0
    for number, row in enumerate(written, 1):
        solved += not task.grammar.faults(row)
        yield from _solution(task.grammar, row, f"problem {number}")
        yield ""
    yield f"{solved} of {problems} without a fault"


def _solution(grammar: Grammar, tokens: Sequence[int], title: str) -> Iterator[str]:
    faults = grammar.faults(tokens)
    problem, *steps = grammar.read(tokens)
    yield f"{title}, over Z/{grammar.modulus}: {_as_fraction(problem.words)}"
    for line in steps:
        own_faults = [fault for fault in faults if fault.step == line.step]
        yield f"  {WRONG if own_faults else RIGHT} {line.step:<20} {readable(line.words)}"
        yield from (f"      {fault}" for fault in own_faults)


def readable(words: Sequence[str]) -> str:
    """Joins tokens to a formula: 3 x ^ 2 + 5 x ^ 0 becomes 3x^2 + 5."""
    text = re.sub(r" ?([x^]) ?", r"\1", " ".join(words))
    text = re.sub(r"x\^0\b", "", re.sub(r"x\^1\b", "x", text))
    return re.sub(r" ?;", ";", text).rstrip(";").removeprefix(": ")


def _as_fraction(words: Sequence[str]) -> str:
    return " / ".join(f"({part})" for part in readable(words).split(" / "))
