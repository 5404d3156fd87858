"""Smaller models that keep a loss: trained from the structure of a run, each to a named work.

A try is a run of one work and one seed. It begins with the smallest structure that has the loss so
far, new weights, and a work per token below that structure's. It costs little, because the model is
small from its first step on.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from gaugelasso.baselines.setting import Bar
from gaugelasso.baselines.source import known_schedule
from gaugelasso.compress.accountings import least_work
from gaugelasso.compress.courses.metric_target import MetricTarget
from gaugelasso.config import Config, run_config
from gaugelasso.config.base import BaseModel
from gaugelasso.config.target import TargetConfig
from gaugelasso.errors import UserError
from gaugelasso.runs.checkpoint import load_model
from gaugelasso.runs.reading import exists, read_json
from gaugelasso.sweeps.arms import Arm, failures_message
from gaugelasso.sweeps.sweep import Plan, run_sweep

# A smaller step than this is within what two trainings of one model differ by.
_LEAST_STEP = 0.9
# Works and losses of other units or data do not compare with those of the run.
_OF_THE_RUN = ("train.seed", "train.final_batches", "compress.accounting", "compress.profile")
# What a rival's run has together with the run that it began with.
_SCHEDULE = {"train.steps", "train.warmup"}

Row = dict[str, Any]


def squeeze_settings(run: Path, summary: Mapping[str, Any], changes: Mapping[str, str]) -> Config:
    """Return the config of the tries: that of the run, with its final work as the target.

    UserError if a change is of what a try takes from its run, for a run with pretrained weights,
    and for one without pressure.
    """
    for key, value in changes.items():
        if key in _OF_THE_RUN or key.startswith(
            ("task.", "model.", "target.", "compress.serving_")
        ):
            raise UserError(
                f"--set {key}={value}: squeeze takes {key} from its run; other keys of [compress] "
                "and [train] can be set"
            )
    if isinstance(run_config(run).model, BaseModel):
        raise UserError(
            f"{str(run)!r} began with pretrained weights, and squeeze trains new ones; name a "
            "smaller work with gaugelasso compress, or target.fma, instead"
        )
    whole: Mapping[str, str] = {}
    if summary.get("source") and not changes.keys() >= _SCHEDULE:
        whole = {f"train.{key}": str(value) for key, value in known_schedule(run, summary).items()}
    config = run_config(run, {**whole, **changes})
    if config.compress.has_no_pressure:
        raise UserError(
            f"{str(run)!r} was trained without pressure (compress.solver = 'fixed' with "
            "compress.rho = 0), by which squeeze removes channels; add "
            "--set compress.solver=conservative"
        )
    return replace(config, target=TargetConfig(fma=float(summary["fma_final"])))


@dataclass(frozen=True)
class Goal:
    """What a try must have on selection data: the loss, and a metric where the run names one."""

    bar: Bar
    metric: MetricTarget | None = None

    def reached_by(self, summary: Mapping[str, Any]) -> bool:
        if not self.bar.reached_by(summary.get("selection_loss")):
            return False
        found = summary.get("selection_metric")
        return self.metric is None or (found is not None and self.metric.is_met(found))


class Squeeze:
    """The tries from a run in the folder `out`. `plan` gives config, seeds and processes.

    What to try next follows from the tries that are finished, so the same command goes on after an
    interruption.
    """

    def __init__(
        self, run: Path, config: Config, out: Path, goal: Goal, plan: Plan, step: float
    ):  # fmt: skip
        self.config, self.out, self.goal, self.plan = config, out, goal, plan
        self.step, self.rows = step, list[Row]()
        # Works that a round tries; seeds share the jobs.
        self.at_once = max(1, plan.jobs // len(plan.seeds))
        self.first = self._row(run)

    def run(
        self,
        rounds: int,
        console: Console,
        on_round: Callable[[list[Row], Row], None],
        known: int = 0,
    ) -> Row:
        """Return the row of the smallest model that has the loss, which may be the run itself.

        Rounds go on until `known` tries are counted, which are finished already, however few are
        asked for. After each round `on_round` gets its rows and the smallest so far.
        """
        best, step = self.first, self.step
        while (rounds > 0 or len(self.rows) < known) and step <= _LEAST_STEP:
            arms = self._arms(best, step)
            found = self._train(best, arms, console) if arms else []
            smaller = [row for row in found if row["held"] and row["work"] < best["work"]]
            if smaller:
                best = min(smaller, key=lambda row: row["work"])
            else:
                step = math.sqrt(step)
            if arms:
                rounds -= 1
                self.rows += found
                on_round(found, best)
        return best

    def _arms(self, best: Row, step: float) -> list[Arm]:
        """What to try next, by falling work, without what was tried."""
        least = least_work(load_model(Path(best["folder"])), self.config.compress)
        works = [best["work"] * step**number for number in range(1, self.at_once + 1)]
        arms = [self._arm(best, work) for work in works if work >= least]
        tried = {Path(row["folder"]).parent for row in self.rows}
        return [arm for arm in arms if arm.folder not in tried]

    def _arm(self, best: Row, work: float) -> Arm:
        named, before = (
            f"{value:.0f}" if value >= 1000 else f"{value:.6g}" for value in (work, best["work"])
        )
        # The same work from another structure is another try.
        folder, changes = self.out / f"{named}-from-{before}", (f"target.fma={named}",)
        return Arm(f"work {named}", changes, folder, ("--structure", best["folder"]))

    def _train(self, best: Row, arms: Sequence[Arm], console: Console) -> list[Row]:
        """Return the rows of tries, trained where they are not finished.

        A try that does not reach its work exits as if it failed, and has a summary all the same.
        One that diverged has none, and misses the loss. UserError if all runs ended so.
        """
        runs = [run for arm in arms for run in self._runs(arm)]
        wanted = [arm for arm in arms if not all(map(_is_finished, self._runs(arm)))]
        outcomes = run_sweep(replace(self.plan, arms=wanted), console) if wanted else []
        if not any(map(_is_finished, runs)):
            failed = failures_message(outcomes, len(self.plan.seeds))
            raise UserError(
                f"{failed}; their logs are beside their folders. Give the command again to go on, "
                "or change a setting with --set and another --out"
            )
        return [self._row(run, best["folder"]) for run in runs]

    def _runs(self, arm: Arm) -> list[Path]:
        return [arm.run_folder(seed) for seed in self.plan.seeds]

    def _row(self, run: Path, origin: str | None = None) -> Row:
        """The figures of a run; none if it has no summary."""
        finished = origin is None or _is_finished(run)
        summary = read_json(run / "summary.json", finite=False) if finished else {}
        return {
            "folder": str(run),
            "from": origin,
            "seed": summary.get("seed"),
            "named_work": summary.get("fma_target"),
            "work": summary.get("fma_final"),
            "parameters": summary.get("parameters_final"),
            "selection_loss": summary.get("selection_loss"),
            "loss": summary.get("loss"),
            "metric": summary.get("metric", {}).get("value"),
            "held": self.goal.reached_by(summary),
            "training_fma": summary.get("training_fma"),
            "wall_s": summary.get("wall_s"),
        }


def _is_finished(run: Path) -> bool:
    return exists(run / "summary.json")
