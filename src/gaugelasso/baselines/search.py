"""Trains the models of a baseline: the search along each ladder, and the retrained structure.

Each model is trained by runs of a sweep, in folders below that of the baseline. What to train next
follows from the runs that are finished, so the same command goes on after an interruption.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from gaugelasso.baselines import members
from gaugelasso.baselines.ladder import Scale, ladder, next_rungs, smallest_reaching
from gaugelasso.baselines.members import Member, Row
from gaugelasso.baselines.setting import Bar
from gaugelasso.config import Config
from gaugelasso.errors import UserError
from gaugelasso.sweeps.arms import failures_message
from gaugelasso.sweeps.sweep import Plan, run_sweep


@dataclass(frozen=True)
class Found:
    """What was trained: the rows of all models, and which of them answer the question."""

    rows: list[Row]  # uniform models by their work, then the retrained structure
    full: Row  # the uniform model that the run began with, or that --set made of it
    smallest: Row | None  # the smallest uniform model that reached the loss
    at_bottom: bool  # whether that is the smallest model of its ladder


class Search:
    """The members of a baseline in the folder `out`. `plan` gives config, seeds and processes."""

    def __init__(
        self, config: Config, out: Path, structure: Path, scales: Sequence[Scale], bar: Bar,
        plan: Plan,
    ):  # fmt: skip
        self.bar, self.plan = bar, plan
        models = {scale: ladder(config, scale) for scale in scales}
        # A model that is on two ladders, as the full one is, is one member.
        self.ladders = [
            [
                members.uniform(model, out, [name for name in scales if model in models[name]])
                for model in rungs
            ]
            for rungs in models.values()
        ]
        self.retrained = members.retrained(structure, out)

    def run(self, console: Console, on_row: Callable[[Row], None]) -> Found:
        """Train until the search is over. UserError if a run failed; Stopped on a signal."""
        told: set[str] = set()
        while True:
            for row in self.rows():
                if row["name"] not in told:
                    told.add(row["name"])
                    on_row(row)
            if not (wanted := self._wanted()):
                return self._found()
            plan = replace(self.plan, arms=[member.arm for member in wanted])
            if failed := failures_message(run_sweep(plan, console), len(plan.seeds)):
                raise UserError(
                    f"{failed}; their logs are beside their folders. Give the command again to go "
                    "on, or change a setting with --set and another --out"
                )

    def rows(self) -> list[Row]:
        """Return the rows of all members that are trained, in the order of the ladders."""
        every = {member.arm.folder: member for rungs in self.ladders for member in rungs}
        trained = [one for one in (*every.values(), self.retrained) if self._is_trained(one)]
        return [member.row(self.plan.seeds, self.bar) for member in trained]

    def _is_trained(self, member: Member) -> bool:
        return member.is_trained(self.plan.seeds)

    def _results(self, rungs: Sequence[Member]) -> dict[int, bool]:
        return {
            number: member.row(self.plan.seeds, self.bar)["held"]
            for number, member in enumerate(rungs)
            if self._is_trained(member)
        }

    def _wanted(self) -> list[Member]:
        """Return the members to train now; none at the end."""
        # Ladders share the processes that the seeds of one model do not need.
        most = max(1, self.plan.jobs // (len(self.plan.seeds) * len(self.ladders)))
        found: dict[Path, Member] = {}
        for rungs in self.ladders:
            for number in next_rungs(self._results(rungs), len(rungs), most):
                found.setdefault(rungs[number].arm.folder, rungs[number])
        if not self._is_trained(self.retrained):
            found[self.retrained.arm.folder] = self.retrained
        return list(found.values())

    def _found(self) -> Found:
        uniform = [row for row in self.rows() if row["kind"] == "uniform"]
        uniform.sort(key=lambda row: row["fma"])
        best = []
        for rungs in self.ladders:
            if (rung := smallest_reaching(self._results(rungs))) is not None:
                best.append((rungs[rung].row(self.plan.seeds, self.bar), rung == 0))
        smallest, at_bottom = min(best, key=lambda one: one[0]["fma"], default=(None, False))
        full = self.ladders[0][-1].row(self.plan.seeds, self.bar)
        last = self.retrained.row(self.plan.seeds, self.bar)
        return Found([*uniform, last], full, smallest, at_bottom)
