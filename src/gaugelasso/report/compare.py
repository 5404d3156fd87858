"""Methods side by side: every seed, means, spread, and a permutation test.

`comparable` loads the runs; milliseconds are measured elsewhere and passed in.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from gaugelasso.errors import UserError
from gaugelasso.report import formats
from gaugelasso.report.costs import known_kinds, named, work_format
from gaugelasso.report.data import (
    check_other_seed,
    check_same,
    note_on_own_loops,
    seed_order,
)
from gaugelasso.report.formats import DASH, known, over_seeds
from gaugelasso.report.goal import target_kinds
from gaugelasso.report.layout import Table
from gaugelasso.report.methods import OWN, families, held, names, work_target
from gaugelasso.report.outcome import common_metric, loss_name, outcome
from gaugelasso.report.permutation import permutation_p
from gaugelasso.report.results import origin, origin_of
from gaugelasso.report.run import Run
from gaugelasso.runs.command import command
from gaugelasso.runs.training_work import total_training
from gaugelasso.runs.units import counts_work, training_accounting

TESTED = ("loss", "metric", "fma", "ms")
TEST = (
    "two-sided permutation test of the difference of means over seeds, not corrected for several "
    "comparisons"
)


@dataclass(frozen=True)
class Member:
    """One run of a method, with its work before and after in the accounting of the comparison.

    `ms` is None if it was neither measured nor estimated, `held` if the method has no target.
    """

    run: Run
    fma_initial: float
    fma: float
    ms: float | None
    held: bool | None

    def value(self, key: str) -> float | None:
        """One of `TESTED`; None if it is missing or not finite."""
        end = outcome(self.run)
        values = {"loss": end.loss, "metric": end.metric, "fma": self.fma, "ms": self.ms}
        found = values[key]
        return found if found is not None and math.isfinite(found) else None


@dataclass(frozen=True)
class Comparison:
    """Methods by name, in the order given, each with its runs by seed.

    `families` are the methods without what tells two of one kind apart. `against` is the method
    that the others are tested against. `ms_of` says what milliseconds are of, empty if there are
    none. `latency` says how they were measured.
    """

    methods: Mapping[str, list[Member]]
    families: Mapping[str, str]
    against: str
    accounting: str
    ms_of: str
    latency: Mapping[str, Any] | None = None

    @property
    def runs(self) -> list[Run]:
        return [member.run for members in self.methods.values() for member in members]

    @property
    def metric_name(self) -> str | None:
        return common_metric(self.runs)

    def values(self, name: str, key: str) -> list[float | None]:
        """One of `TESTED` for each run of a method; None for metrics that are not the same one."""
        if key == "metric" and self.metric_name is None:
            return [None] * len(self.methods[name])
        return [member.value(key) for member in self.methods[name]]

    def work_target(self, run: Run) -> float | None:
        """The work that a run names; None if it names none, or by another accounting."""
        named = work_target(run) if run.accounting == self.accounting else None
        return None if named is None else named[1]

    def training_work(self, run: Run) -> float | None:
        """Of a run and of those that it needs; None if not known, or by another accounting."""
        return total_training(run.summary or {}) if self.counts_training(run) else None

    def counts_training(self, run: Run) -> bool:
        """Whether the training work of a run is of the accounting of the comparison."""
        return training_accounting(run.accounting) == self.accounting

    def work_targets(self, name: str) -> list[float | None]:
        return [self.work_target(member.run) for member in self.methods[name]]

    @property
    def work_targets_differ(self) -> bool:
        """Whether a method has seeds with different work targets."""
        return any(len(set(self.work_targets(name))) > 1 for name in self.methods)

    def missed(self, name: str) -> str:
        """How many runs of a method missed their target; empty if none did."""
        judged = [member.held for member in self.methods[name]]
        return f"{judged.count(False)} of {len(judged)} missed" if False in judged else ""

    def p_value(self, name: str, key: str) -> float | None:
        """Of a method against the one that is compared with.

        None if seeds are too few, or one of them has no finite figure.
        """
        pair = [self.values(each, key) for each in (name, self.against)]
        if name == self.against or any(None in values for values in pair):
            return None
        return permutation_p(*([v for v in values if v is not None] for values in pair))


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
    starts = [_work(run, accounting, run.costs_initial, "fma_initial") for run in runs]
    kinds = families(runs, starts)
    groups: dict[str, list[Member]] = {}
    family_of: dict[str, str] = {}
    for run, name, kind, start in zip(runs, names(runs, kinds), kinds, starts, strict=True):
        work = _work(run, accounting, run.costs_final, "fma_final")
        member = Member(run, start, work, times.get(run.path), held(run))
        groups.setdefault(name, []).append(member)
        family_of[name] = kind
    methods = {}
    for name, group in groups.items():
        methods[name] = sorted(group, key=lambda member: seed_order(member.run))
        for before, after in pairwise(member.run for member in methods[name]):
            check_other_seed(before, after, f"are both {name},")
    if against is not None and against not in methods:
        raise UserError(f"--against {against!r} is not one of {', '.join(map(repr, methods))}")
    ours = [name for name, family in family_of.items() if family == OWN]
    chosen = against or next(iter([*ours, *methods]))
    ms_of = "ms, measured" if measured else named("ms", runs) if estimated else ""
    return Comparison(methods, family_of, chosen, accounting, ms_of, latency)


def compare_table(found: Comparison) -> Table:
    """A row for each method with mean ± standard deviation, then a row for each of its seeds."""
    first = found.runs[0]
    metric = found.metric_name
    tested: dict[str, tuple[str, formats.Format]] = {
        "fma": ("FMA per token", work_format("fma")),
        **({"ms": ("ms", formats.figure)} if found.ms_of else {}),
        "loss": (loss_name(found.runs), formats.figure),
    }
    if metric is not None and metric != tested["loss"][0]:
        tested["metric"] = (metric, formats.metric_format(metric, digits=3))
    forms = [form for _, form in tested.values()]
    headers = ["method", first.told_by, *(head for head, _ in tested.values())]
    if found.work_targets_differ:
        headers, forms = [*headers, "work target"], [*forms, formats.short]
    headers, forms = [*headers, "total training work", "target"], [*forms, formats.short]
    rows = []
    for name, members in found.methods.items():
        number = len(members)
        columns = [found.values(name, key) for key in tested]
        columns += [found.work_targets(name)] if found.work_targets_differ else []
        columns += [[found.training_work(member.run) for member in members]]
        rows.append([
            name, f"{number} {first.told_by}{'' if number == 1 else 's'}",
            *map(over_seeds, columns, forms), _held_cell(members),
            *(known(found.p_value(name, key), formats.figure) for key in tested),
        ])  # fmt: skip
        for member, values in zip(members, zip(*columns, strict=True), strict=True):
            rows.append(["", member.run.mark, *map(known, values, forms),
                         _held_cell([member]), *("" for _ in tested)])  # fmt: skip
    headers += [f"p, {head}" for head, _ in tested.values()]
    note = (
        f"Task {first.task}; mean ± standard deviation over seeds.{note_on_own_loops(found.runs)}"
        f"{'' if metric else ' No metric is shown, because not all runs have the same one.'} Total "
        "training work: of a run and of the runs that it needs, as the full model that a rival "
        f"begins with, or the run that found a structure; {DASH} where that is not known, or "
        "counted by another accounting. Target: what a run names, and whether it is held; "
        f"{DASH} where a method names none. p: against {found.against}, {TEST}; {DASH} where seeds "
        "are too few, or one has no finite figure. "
    )
    note += f"{found.ms_of}{_latency_note(found.latency)}. " if found.ms_of else ""
    # The commands of all runs would be longer than the table.
    ran = f"{command()}; those of the runs are in compare.json"
    results = origin_of(found.runs) | {"accounting": found.accounting, "command": ran}
    return Table("Methods", headers, rows, note + origin(results))


def _held_cell(members: Sequence[Member]) -> str:
    """Of one run held or missed, of several how many are held, and what is named.

    A dash if there is no target.
    """
    held = [member.held for member in members]
    if None in held:
        return DASH
    kinds = target_kinds(members[0].run)
    which = f" ({kinds})" if kinds else ""
    if len(held) == 1:
        return f"{'held' if held[0] else 'missed'}{which}"
    return f"{held.count(True)} of {len(held)} held{which}"


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


def _work(run: Run, accounting: str, costs: Mapping[str, Any], key: str) -> float:
    """The work of the summary under `key`, or of `costs` if the run has another accounting."""
    same = run.accounting == accounting
    return float((run.summary or {})[key] if same else costs["fma"])


def _latency_note(latency: Mapping[str, Any] | None) -> str:
    if latency is None:
        return ""
    return (
        f": one sequence, forward pass, median of {latency['repeats']} on {latency['device']}, "
        f"{latency['hardware']}"
    )
