"""Methods side by side: every seed, means, spread, and a permutation test.

A method is what the summary of a run says, or gaugelasso. Runs are compared only if they have one
task and the same data. Reads run folders; milliseconds are measured elsewhere and passed in.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from gaugelasso.errors import UserError
from gaugelasso.report import formats
from gaugelasso.report.costs import known_kinds, named, work_format
from gaugelasso.report.data import (
    check_finished,
    check_same,
    condition_labels,
    load_run,
    run_folders,
    settings,
)
from gaugelasso.report.formats import DASH, known, over_seeds
from gaugelasso.report.layout import Table
from gaugelasso.report.outcome import outcome
from gaugelasso.report.permutation import permutation_p
from gaugelasso.report.results import origin, origin_of
from gaugelasso.report.run import Run
from gaugelasso.runs.units import counts_work

OWN = "gaugelasso"
_ALIASES = {"compression": OWN}
TESTED = ("loss", "metric", "fma", "ms")
_TEST = (
    "two-sided permutation test of the difference of means over seeds, not corrected for several "
    "comparisons"
)


@dataclass(frozen=True)
class Member:
    """One run of a method. `ms` is None if it was neither measured nor estimated."""

    run: Run
    fma: float
    ms: float | None

    def value(self, key: str) -> float | None:
        """One of `TESTED`; None if it is missing or not finite."""
        end = outcome(self.run)
        values = {"loss": end.loss, "metric": end.metric, "fma": self.fma, "ms": self.ms}
        found = values[key]
        return found if found is not None and math.isfinite(found) else None


@dataclass(frozen=True)
class Comparison:
    """Methods by name, in the order given, each with its runs by seed.

    `against` is the method that the others are tested against. `ms_of` says what milliseconds are
    of, empty if there are none. `latency` says how they were measured.
    """

    methods: Mapping[str, list[Member]]
    against: str
    accounting: str
    ms_of: str
    latency: Mapping[str, Any] | None = None

    @property
    def runs(self) -> list[Run]:
        return [member.run for members in self.methods.values() for member in members]

    def values(self, name: str, key: str) -> list[float | None]:
        return [member.value(key) for member in self.methods[name]]

    def p_value(self, name: str, key: str) -> float | None:
        """Of a method against the one that is compared with; None if seeds are too few."""
        pair = [self.values(each, key) for each in (name, self.against)]
        if name == self.against or any(None in values for values in pair):
            return None
        return permutation_p(*([v for v in values if v is not None] for values in pair))


def load_runs(paths: Sequence[Path]) -> list[Run]:
    """The runs to compare; UserError unless all are finished and have one task and its data."""
    runs = [load_run(folder) for folder in run_folders(paths)]
    if len(runs) < 2:
        raise UserError("compare needs two runs or more; give run folders, or folders with runs")
    check_finished(runs)
    # Where downloads are kept does not matter.
    shared = {key for run in runs for key in settings(run) if key.startswith("task.")}
    for before, run in pairwise(runs):
        check_same(before, run, "cannot be compared", only=shared - {"task.cache"})
        pair = f"{str(before.path)!r} and {str(run.path)!r} cannot be compared"
        for name in sorted({*_data(before), *_data(run)}):
            if _data(before).get(name) != _data(run).get(name):
                raise UserError(f"{pair}: their data differ ({name}, in initial.json)")
        parts = [(each.summary or {}).get("evaluated_on") for each in (before, run)]
        if parts[0] != parts[1]:
            raise UserError(f"{pair}: evaluated_on is {parts[0]!r} in one and {parts[1]!r} in the "
                            "other")  # fmt: skip
    return runs


def compare(
    runs: Sequence[Run],
    against: str | None = None,
    measured: Mapping[Path, float] | None = None,
    latency: Mapping[str, Any] | None = None,
) -> Comparison:
    """Group runs by method. `measured` are milliseconds by run folder, `latency` how they were."""
    accounting = _common_accounting(runs)
    estimated = measured is None and "ms" in known_kinds(runs)
    times = measured or {run.path: run.costs_final["ms"] for run in runs if estimated}
    groups: dict[str, list[Run]] = {}
    for run, name in zip(runs, _names(runs), strict=True):
        groups.setdefault(name, []).append(run)
    methods = {}
    for name, group in groups.items():
        group.sort(key=lambda run: run.seed)
        for before, run in pairwise(group):
            if before.seed == run.seed:
                raise UserError(
                    f"{str(before.path)!r} and {str(run.path)!r} are both {name}, seed {run.seed}; "
                    "give only one of them"
                )
        methods[name] = [Member(run, _work(run, accounting), times.get(run.path)) for run in group]
    if against is not None and against not in methods:
        raise UserError(f"--against {against!r} is not one of {', '.join(map(repr, methods))}")
    chosen = against or (OWN if OWN in methods else next(iter(methods)))
    ms_of = "ms, measured" if measured else named("ms", runs) if estimated else ""
    return Comparison(methods, chosen, accounting, ms_of, latency)


def compare_table(found: Comparison) -> Table:
    """A row for each method with mean ± standard deviation, then a row for each of its seeds."""
    first = found.runs[0]
    metric = formats.metric_format(first.metric_name, digits=3)
    columns: list[tuple[str, str, formats.Format]] = [
        ("fma", "FMA per token", work_format("fma")),
        *([("ms", "ms", formats.figure)] if found.ms_of else []),
        ("loss", "held-out loss", formats.figure),
        ("metric", first.metric_name, metric),
    ]
    rows = []
    for name, members in found.methods.items():
        number = len(members)
        training = [outcome(member.run).training_fma for member in members]
        rows.append([
            name, f"{number} seed{'' if number == 1 else 's'}",
            *(over_seeds(found.values(name, key), form) for key, _, form in columns),
            over_seeds(training, formats.short),
            *(known(found.p_value(name, key), formats.figure) for key, _, _ in columns),
        ])  # fmt: skip
        for member, work in zip(members, training, strict=True):
            cells = [known(member.value(key), form) for key, _, form in columns]
            rows.append(["", str(member.run.seed), *cells, known(work, formats.short),
                         *("" for _ in columns)])  # fmt: skip
    headers = ["method", "seed", *(head for _, head, _ in columns), "training work"]
    headers += [f"p, {head}" for _, head, _ in columns]
    note = f"Task {first.task}; mean ± standard deviation over seeds. p: against {found.against}, "
    note += f"{_TEST}; {DASH} where seeds are too few. "
    note += f"{found.ms_of}{_latency_note(found.latency)}. " if found.ms_of else ""
    results = origin_of(found.runs) | {"accounting": found.accounting}
    return Table("Methods", headers, rows, note + origin(results))


def compare_results(found: Comparison) -> dict[str, Any]:
    """The same as JSON: `runs`, each with its method, and `methods` with their means."""
    first = found.runs[0]
    return {
        **origin_of(found.runs),
        "task": first.task,
        "metric_name": first.metric_name,
        "metric_lower_is_better": first.metric_lower_is_better,
        "accounting": found.accounting,
        "ms_of": found.ms_of or None,
        "latency": found.latency,
        "against": found.against,
        "test": _TEST,
        "runs": [
            {"method": name, **_run_result(member)}
            for name, members in found.methods.items()
            for member in members
        ],
        "methods": [
            {
                "method": name,
                "seeds": [member.run.seed for member in members],
                **{key: _spread(found.values(name, key)) for key in TESTED},
                "p": {key: found.p_value(name, key) for key in TESTED},
            }
            for name, members in found.methods.items()
        ],
    }


def _run_result(member: Member) -> dict[str, Any]:
    run, end = member.run, outcome(member.run)
    return {
        "seed": run.seed, "folder": str(run.path), "fma_final": member.fma, "ms": member.ms,
        "loss": member.value("loss"), "metric": member.value("metric"),
        "parameters_final": end.parameters_final, "training_fma": end.training_fma,
        "wall_s": end.wall_s,
    }  # fmt: skip


def _spread(values: Sequence[float | None]) -> dict[str, float | None] | None:
    present = [value for value in values if value is not None]
    if len(present) < len(values):
        return None
    std = statistics.stdev(present) if len(present) > 1 else None
    return {"mean": statistics.fmean(present), "std": std, "min": min(present), "max": max(present)}


def _names(runs: Sequence[Run]) -> list[str]:
    """The method of each run; with its settings where one method has several."""
    methods = [str((run.summary or {}).get("method", OWN)) for run in runs]
    methods = [_ALIASES.get(method, method) for method in methods]
    names = list(methods)
    for method in dict.fromkeys(methods):
        places = [place for place, each in enumerate(methods) if each == method]
        labels = condition_labels([runs[place] for place in places])
        if len(set(labels)) > 1:
            for place, label in zip(places, labels, strict=True):
                names[place] = f"{method} ({label})"
    return names


def _data(run: Run) -> Mapping[str, Any]:
    """Sizes and digests of the data that the task read from disk; empty if it read none."""
    data = run.initial.get("data")
    return data if isinstance(data, dict) else {}


def _common_accounting(runs: Sequence[Run]) -> str:
    """The accounting of all runs if it counts work and is one; else FMA, if all know it."""
    accountings = {run.accounting for run in runs}
    if len(accountings) == 1 and counts_work(runs[0].accounting):
        return runs[0].accounting
    if "fma" not in known_kinds(runs):
        for before, run in pairwise(runs):
            check_same(before, run, "cannot be compared", only={"compress.accounting"})
        raise UserError(f"{str(runs[0].path)!r} cannot be compared: its summary has no FMA")
    return "fma"


def _work(run: Run, accounting: str) -> float:
    same = run.accounting == accounting
    return outcome(run).fma_final if same else float(run.costs_final["fma"])


def _latency_note(latency: Mapping[str, Any] | None) -> str:
    if latency is None:
        return ""
    return (
        f": one sequence, forward pass, median of {latency['repeats']} on {latency['device']}, "
        f"{latency['hardware']}"
    )
