"""Which method a run is of, under which conditions, and whether it has what it names.

The family of a run follows from its summary and its config, so that it is the same whatever it is
compared with. Only plain training needs the others: it is of the full model, or of a smaller one.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from gaugelasso.errors import UserError
from gaugelasso.report.condition_labels import condition_labels
from gaugelasso.report.data import settings
from gaugelasso.report.goal import is_held
from gaugelasso.report.run import Run

OWN, EXCHANGE = "compression", "exchange"
FULL, UNIFORM = "full", "uniform"
_PLAIN = "plain"
# Training without pressure has nothing to hold: the target in its config is a number to pass.
_WITHOUT_TARGET = (_PLAIN, "from scratch")
# The tables of a summary that hold the options of a method, and with them what it found.
_OPTIONS = ("pruning", "cofi", "torch_pruning")
_FOUND = {
    "rounds_made", "version", "reached", "masks", "lambda_1", "lambda_2", "lambda_1_per_1000_steps",
}  # fmt: skip
# Of `prune`, the option without an effect by the target that is given: it has its default then.
_UNUSED = {"loss": "rounds", "fma": "channels"}
# Work targets at most this much apart are one condition: each seed of a rival may be given the
# work of another run with that seed.
_SAME_WORK = 0.1
_WORKS = ("fma", "target", "target.fma")  # the keys of work targets
# Settings that such a method sets from its options.
_SET_BY_OPTIONS = ("target.", "train.steps", "train.warmup", "train.cooldown", "train.saturation")


def families(runs: Sequence[Run], starts: Sequence[float]) -> list[str]:
    """The family of each run. `starts` are their works before training, in one accounting."""
    begun = [
        work
        for run, work in zip(runs, starts, strict=True)
        if aims(run)
    ]  # fmt: skip
    full = max(begun, default=None)
    return [_family(run, work, full) for run, work in zip(runs, starts, strict=True)]


def _family(run: Run, start: float, full: float | None) -> str:
    method = _method(run)
    if method == OWN:
        return EXCHANGE if run.config["compress"].get("exchange") else OWN
    if method == _PLAIN and full is not None:
        return UNIFORM if start < full else FULL
    if method == "cofi" and options(run).get("objective") == "parameters":
        return "cofi-parameters"
    return method


def names(runs: Sequence[Run], of: Sequence[str]) -> list[str]:
    """The name of each run's method: its family, with what differs where a family has several."""
    found = list(of)
    for family in dict.fromkeys(of):
        places = [place for place, each in enumerate(of) if each == family]
        group = [runs[place] for place in places]
        labels = condition_labels(group, _joined(group))
        if len(set(labels)) > 1:
            for place, label in zip(places, labels, strict=True):
                found[place] = f"{family} ({label})"
    return found


def labels(runs: Sequence[Run], starts: Sequence[float]) -> list[str]:
    """The condition of each run: what differs, after the family where there are several.

    `starts` as in `families`.
    """
    of = families(runs, starts)
    if len(set(of)) > 1:
        return names(runs, of)
    return condition_labels(runs, [conditions(run) for run in runs])


def check_one_condition(runs: Sequence[Run]) -> None:
    """UserError if finished runs of one method differ in an option or in what they began with.

    Runs without an option, as of early versions, do not differ in it.
    """
    ended = [run for run in runs if run.summary]
    found = _joined(ended)
    # Works are not joined where another option differs: that one is the reason.
    keys = {key for one in found for key in one}
    for key in sorted(keys, key=lambda key: (key in _WORKS, key)):
        having = [(run, one[key]) for run, one in zip(ended, found, strict=True) if key in one]
        for (before, ours), (run, theirs) in pairwise(having):
            if ours != theirs:
                one, other = (conditions(each)[key] for each in (before, run))
                limit = f"; up to {_SAME_WORK:.0%} is one condition" if key in _WORKS else ""
                raise UserError(
                    f"{str(before.path)!r} and {str(run.path)!r} are not runs of one condition: "
                    f"{key} is {one!r} in one and {other!r} in the other{limit}"
                )


def _joined(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The conditions of each run; runs that differ in their work target alone have its range.

    A seed that occurs twice says that the work is what is varied: such runs stay apart.
    """
    found = [conditions(run) for run in runs]
    of_all = set[str]().union(*found).intersection(*found)
    alike: dict[tuple[str, str], list[tuple[float, int]]] = {}
    for place, run in enumerate(runs):
        if (named := work_target(run)) is not None:
            key, work = named
            others = sorted((k, v) for k, v in found[place].items() if k in of_all - {key})
            alike.setdefault((key, repr(others)), []).append((work, place))
    for (key, _), group in alike.items():
        for close in _close(group):
            seeds = {runs[place].seed for _, place in close}
            if len(seeds) == len(close):
                for _, place in close:
                    found[place][key] = _range([work for work, _ in close])
    return found


def _close(works: Sequence[tuple[float, int]]) -> list[list[tuple[float, int]]]:
    """Work targets with the places of their runs, in groups that count as one condition."""
    groups: list[list[tuple[float, int]]] = []
    for work, place in sorted(works):
        if groups and work <= groups[-1][0][0] * (1 + _SAME_WORK):
            groups[-1].append((work, place))
        else:
            groups.append([(work, place)])
    return groups


def _range(works: Sequence[float]) -> float | str:
    """One work target, or the least and the largest of several."""
    low, high = min(works), max(works)
    return low if low == high else f"{low:g} to {high:g}"


def shared_conditions(runs: Sequence[Run]) -> dict[str, Any]:
    """The conditions of the runs of one method, whose work targets may differ a little."""
    found, named = conditions(runs[0]), [each for run in runs if (each := work_target(run))]
    if named:
        found[named[0][0]] = _range([work for _, work in named])
    return found


def work_target(run: Run) -> tuple[str, float] | None:
    """The work that a run names, after its key in `conditions`; None if it names none."""
    found = conditions(run)
    key = "target" if found.get("objective") == "fma" else "fma" if "fma" in found else "target.fma"
    value = found.get(key)
    return (key, float(value)) if isinstance(value, int | float) and value > 0 else None


def conditions(run: Run) -> dict[str, Any]:
    """All that changes the result of a run except its seed: settings, and the method's options."""
    given, found = options(run), settings(run)
    if given:
        found = {k: v for k, v in found.items() if not k.startswith(_SET_BY_OPTIONS)}
    return found | given | _beginning(run)


def _beginning(run: Run) -> dict[str, Any]:
    """The kind of model that a method began with, if it began with one.

    Steps are of a plain model only: a compressed one may end when it has its target, so that its
    seeds differ a little in their steps.
    """
    source = (run.summary or {}).get("source")
    if source is None:
        return {}
    method = source.get("method") or OWN
    steps = source.get("steps") if method == _PLAIN else None
    return {"source.method": method, "source.steps": steps}


def options(run: Run) -> dict[str, Any]:
    """The options of a method that has its own, by their names; else empty.

    None for an option that is not given or has no effect.
    """
    tables: list[Mapping[str, Any]] = [(run.summary or {}).get(key, {}) for key in _OPTIONS]
    found = {key: v for table in tables for key, v in table.items() if key not in _FOUND}
    if "mask_rate" in found:  # of CoFi, whose masks had no bound in early versions
        found.setdefault("mask_bound", 0.0)
    unused = [_UNUSED[key] for key in _UNUSED if found.get(key) is not None]
    return found | {key: None for key in unused if key in found}


def aims(run: Run) -> bool:
    """Whether the method of a run works towards the target in its config."""
    return _method(run) not in _WITHOUT_TARGET


def held(run: Run) -> bool | None:
    """Whether a finished run has what it names; None if its method names nothing."""
    return is_held(run) if aims(run) else None


def _method(run: Run) -> str:
    """As the summary has it; early versions had compression alone."""
    return str((run.summary or {}).get("method", OWN))
