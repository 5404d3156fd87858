"""The models of a baseline: their run folders, and the figures of those that are trained."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gaugelasso.baselines.ladder import Scale, settings_of
from gaugelasso.baselines.retrained import from_scratch
from gaugelasso.baselines.setting import Bar
from gaugelasso.config.model import ModelConfig
from gaugelasso.errors import UserError
from gaugelasso.runs.reading import exists, read_json
from gaugelasso.runs.units import final_work
from gaugelasso.sweeps.arms import Arm

Row = dict[str, Any]

_WIDTHS = ("width", "layers", "heads", "d_k", "d_v", "d_f")


@dataclass(frozen=True)
class Member:
    """A model to train with every seed: a uniform one, or (`model` None) the run's structure."""

    arm: Arm
    model: ModelConfig | None
    scales: tuple[Scale, ...] = ()  # the ladders that it is on

    def is_trained(self, seeds: Sequence[int]) -> bool:
        return all(exists(self.arm.run_folder(seed) / "summary.json") for seed in seeds)

    def row(self, seeds: Sequence[int], bar: Bar) -> Row:
        """Return the figures of a trained model, over its seeds and of each."""
        runs = [run_row(self.arm.run_folder(seed), bar) for seed in seeds]
        widths = {key: getattr(self.model, key) for key in _WIDTHS} if self.model else None
        return {
            "name": self.arm.name,
            "kind": "uniform" if self.model else "retrained",
            "widths": widths,
            "scales": list(self.scales),
            **median_row(runs, bar),
        }


def uniform(model: ModelConfig, out: Path, scales: Sequence[Scale]) -> Member:
    """Return the member of a uniform model; its folder names all widths that a ladder changes."""
    widths = f"width{model.width}-heads{model.heads}-k{model.d_k}-v{model.d_v}-f{model.d_f}"
    heads = "1 head" if model.heads == 1 else f"{model.heads} heads"
    sizes = f"{model.d_k}" if model.d_k == model.d_v else f"{model.d_k}/{model.d_v}"
    name = f"width {model.width}, {heads} of {sizes}"
    return Member(Arm(name, settings_of(model), out / widths), model, tuple(scales))


def retrained(structure: Path, out: Path) -> Member:
    """Return the member that trains the run's structure, of this file, with new weights."""
    return Member(from_scratch("retrained", structure, out / "retrained"), None)


def run_row(folder: Path, bar: Bar) -> Row:
    """Return the figures of one finished run; its folder is the last key."""
    path = folder / "summary.json"
    summary = read_json(path, finite=False)
    try:
        return {
            "seed": summary["seed"],
            "fma": final_work(summary),
            "parameters": summary["parameters_final"],
            "training_fma": summary["training_fma"],
            "selection_loss": summary["selection_loss"],
            "loss": summary["loss"],
            "metric": summary["metric"]["value"],
            "held": bar.reached_by(summary["selection_loss"]),
            "wall_s": summary["wall_s"],
            "folder": str(folder),
        }
    except (KeyError, TypeError) as error:
        raise UserError(f"{str(path)!r}: not a summary of a run ({error} is missing)") from None


def median_row(runs: Sequence[Row], bar: Bar) -> Row:
    """Return the figures over seeds: losses are low medians, so half of the seeds decide.

    The low median is a loss that was measured; it is within the limit exactly if at least half of
    the seeds are.
    """
    middle = {key: _low_median([run[key] for run in runs]) for key in ("selection_loss", "loss")}
    metrics = [run["metric"] for run in runs if run["metric"] is not None]
    return {
        **{key: runs[0][key] for key in ("fma", "parameters", "training_fma")},
        **middle,
        "metric": statistics.median(metrics) if metrics else None,
        "held": bar.reached_by(middle["selection_loss"]),
        "latency_ms": None,
        "latency_quartiles": None,
        "runs": list(runs),
    }


def _low_median(losses: Sequence[float | None]) -> float | None:
    """A loss that was not finite is worse than all others."""
    ordered = sorted(losses, key=lambda loss: (loss is None, loss or 0.0))
    return ordered[(len(ordered) - 1) // 2]
