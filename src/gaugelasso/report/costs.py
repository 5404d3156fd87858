"""What a run's model costs in FMA, bytes and milliseconds, whatever its accounting is."""

from collections.abc import Sequence
from dataclasses import dataclass

from gaugelasso.report.formats import Format, count, figure
from gaugelasso.report.run import Run
from gaugelasso.runs.units import counts_work

# What a run's files hold beside its own accounting: key, and the accounting that it is of.
KINDS = {"fma": "fma", "bytes": "bytes", "ms": "latency"}
_NAMES = {"fma": "FMA per token", "bytes": "bytes", "ms": "ms"}


def work_format(accounting: str) -> Format:
    """How costs are written: milliseconds with four digits, the others as counts."""
    return figure if accounting == "latency" else count


def known_kinds(runs: Sequence[Run]) -> list[str]:
    """The costs that all runs have, before and after; milliseconds only of one profile."""
    found = [
        kind
        for kind in KINDS
        if all(kind in costs for run in runs for costs in (run.costs_initial, run.costs_final))
    ]
    of = {run.costs_final.get("profile") for run in runs}
    return [kind for kind in found if kind != "ms" or len(of) == 1]


@dataclass(frozen=True)
class Column:
    """A cost beside that of the accounting; milliseconds of one profile."""

    name: str
    kind: str
    of: tuple[Run, ...]

    @property
    def form(self) -> Format:
        return work_format(KINDS[self.kind])

    def before(self, run: Run) -> float | None:
        return run.costs_initial.get(self.kind) if self._has(run) else None

    def after(self, run: Run) -> float | None:
        return run.costs_final.get(self.kind) if self._has(run) else None

    def _has(self, run: Run) -> bool:
        return any(each is run for each in self.of)

    @property
    def title(self) -> str:
        """The name, with what the cost is of."""
        title = named(self.kind, self.of)
        return title if self.name == self.kind else title.replace("ms", self.name, 1)


def cost_columns(runs: Sequence[Run], accounting: str) -> list[Column]:
    """The costs that any of the runs has, before and after, but for that of the accounting.

    A run without one has a dash there. Milliseconds of several profiles are columns of their own,
    with a number each.
    """
    columns = []
    for kind in KINDS:
        knowing = [run for run in runs if kind in run.costs_initial and kind in run.costs_final]
        if KINDS[kind] == accounting or not knowing:
            continue
        groups: dict[object, list[Run]] = {}
        for run in knowing:
            of = run.costs_final.get("profile") if kind == "ms" else None
            groups.setdefault(of, []).append(run)
        for number, members in enumerate(groups.values(), start=1):
            name = kind if len(groups) == 1 else f"{kind} {number}"
            columns.append(Column(name, kind, tuple(members)))
    return columns


def named(kind: str, runs: Sequence[Run]) -> str:
    """The name of a cost, with what it is of."""
    return f"{_NAMES[kind]} ({of})" if (of := _of(kind, runs)) else _NAMES[kind]


def about(accounting: str, runs: Sequence[Run]) -> str:
    """What the costs of an accounting are of, to be added to its name."""
    kinds = [kind for kind, of in KINDS.items() if of == accounting]
    return "".join(f"; {of}" for kind in kinds if (of := _of(kind, runs)))


def _of(kind: str, runs: Sequence[Run]) -> str:
    """Bytes of which weights and cache, milliseconds of what and where, and that they are sums."""
    return "; ".join(sorted({str(run.costs_initial.get(f"{kind}_of", "")) for run in runs} - {""}))


def initial_work(run: Run) -> float:
    """Work per token before: in the run's accounting, or in FMA if that counts no work."""
    counted = counts_work(run.accounting)
    return float(run.initial["fma"] if counted else run.costs_initial.get("fma", 0.0))


def final(run: Run, kind: str) -> float | None:
    """A cost of the final model; None if the run does not know it."""
    return run.costs_final.get(kind)
