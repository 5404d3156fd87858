"""Run folders, read: everything the report knows of a run.

Reads files and rearranges what they say; draws nothing, formats nothing. A run that is
still going on is read as far as it has got.
"""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from gaugelasso.errors import UserError
from gaugelasso.files.untrusted import read_arrays
from gaugelasso.report.shape import shaped, shaped_rows
from gaugelasso.runs.reading import exists, is_folder, read_json, read_rows

# The axes that every layer has, in the order of the network: attention, then MLP.
LAYER_KINDS = ("d_ai", "d_k", "d_v", "d_ao", "d_mi", "d_f", "d_mo")
# The axes that the network has once.
END_AXES = {"D": "D", "d_e": "embedding.d_e", "d_c": "classifier.d_c"}
AXIS_WORDS = {
    "d_ai": "attention reads",
    "d_k": "attention keys",
    "d_v": "attention values",
    "d_ao": "attention writes",
    "d_mi": "MLP reads",
    "d_f": "MLP filters",
    "d_mo": "MLP writes",
    "D": "residual sites",
    "d_e": "embedding writes",
    "d_c": "classifier reads",
}

_NEEDED = ("config.json", "environment.json", "initial.json")
_SECTIONS = ("task", "model", "target", "compress", "train")
# Columns of metrics.jsonl that are not the task's metric, whose name only the task knows.
_PLAIN_COLUMNS = {
    "step", "phase", "loss", "fma", "parameters", "sites", "operators", "rho", "lr", "step_ms",
    "wall_s", "memory_mib", "skipped",
}  # fmt: skip
# Of [train], what shapes the course of a run; the rest is bookkeeping and machinery.
_COURSE = ("steps", "warmup", "cooldown", "saturation", "lr_min", "batch", "accumulate")
_LAYER_AXIS = re.compile(r"_(\d+)\.(\w+)$")


@dataclass(frozen=True)
class Run:
    """One run folder as it stood when it was read."""

    path: Path
    config: dict[str, Any]
    environment: dict[str, Any]
    initial: dict[str, Any]
    metrics: tuple[dict[str, Any], ...]
    events: tuple[dict[str, Any], ...]
    resumed: tuple[dict[str, Any], ...]
    summary: dict[str, Any] | None

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def task(self) -> str:
        return str(self.config["task"]["name"])

    @property
    def seed(self) -> int:
        return int(self.config["train"]["seed"])

    @property
    def accounting(self) -> str:
        return str(self.config["compress"]["accounting"])

    @property
    def loss_target(self) -> float:
        return float(self.config["target"]["loss"])

    @property
    def metric_name(self) -> str:
        if self.summary:
            return str(self.summary["metric"]["name"])
        row = self.metrics[0] if self.metrics else {}
        return next((key for key in row if key not in _PLAIN_COLUMNS), "metric")

    @property
    def metric_lower_is_better(self) -> bool:
        return bool(self.initial.get("metric", {}).get("lower_is_better", False))

    @property
    def metric_is_loss(self) -> bool:
        """Whether the metric is nothing but the loss on held-out data; known at the end."""
        summary = self.summary or {"loss": None}
        return summary["loss"] is not None and summary["loss"] == summary["metric"]["value"]

    def around(self, key: str) -> list[Any]:
        """What environment.json says of `key`, at the start and at each resume."""
        return [
            each[key] for each in (self.environment, *self.resumed) if each.get(key) is not None
        ]

    def samples(self) -> dict[str, np.ndarray]:
        """Images that the task shows, [n, h, w, 3] by name; empty where there are none."""
        path = self.path / "samples.npz"
        if not path.exists():
            return {}
        shown = read_arrays(path)
        for name, images in shown.items():
            if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3:
                raise UserError(f"{str(path)!r}: {name!r} holds no images")
        return shown

    @property
    def pressed(self) -> bool:
        """Whether the penalty ever pressed: an event was held, not only a state gone back to."""
        return any(event.get("returned_to") is None for event in self.events)

    @property
    def last_step(self) -> int:
        """The newest step that the folder speaks of."""
        return max((rows[-1]["step"] for rows in (self.metrics, self.events) if rows), default=0)

    @property
    def layers(self) -> int:
        depths = [depth + 1 for _, depth in _layer_widths(self.initial["widths"])]
        return max([self.initial.get("structure", {}).get("layers", 0), *depths])

    @property
    def cooldown_start(self) -> int | None:
        """Where the structure froze, exact to one log interval; None if it has not."""
        before = 0
        for row in self.metrics:
            if row["phase"] == "cooldown":
                return before
            before = row["step"]
        return None

    @property
    def before_cooldown(self) -> dict[str, Any] | None:
        """The last row of the compression phase, loss being of training; None without one."""
        rows = [row for row in self.metrics if row["phase"] == "compression"]
        if not rows:
            return None
        row = rows[-1]
        metric = row.get(self.metric_name)
        return {"step": row["step"], "loss": row["loss"], "metric": metric, "fma": row["fma"]}

    def widths_at(self, step: int) -> dict[str, int]:
        """Axis name -> surviving indices after `step`; a removed operator has no axes."""
        widths = self.initial["widths"]
        for event in self.events:
            if event["step"] > step:
                break
            widths = event["widths"]
        return widths

    def depth_widths(self, kind: str, step: int) -> list[int]:
        """Extent of one kind of axis in every layer after `step`; 0 where there is no operator."""
        widths = _layer_widths(self.widths_at(step))
        return [widths.get((kind, depth), 0) for depth in range(self.layers)]

    def axis_trajectory(self, axis: str) -> tuple[list[int], list[float]]:
        """(steps, extents) of one axis from step 0 on, constant between the points."""
        points = [(0, self.initial["widths"]), *((e["step"], e["widths"]) for e in self.events)]
        return self._to_the_end([(step, float(widths.get(axis, 0))) for step, widths in points])

    def fma_trajectory(self) -> tuple[list[int], list[float]]:
        """(steps, work per token) from step 0 on, constant between the points."""
        points = [(0, self.initial["fma"]), *((e["step"], e["fma"]) for e in self.events)]
        return self._to_the_end(points)

    def _to_the_end(self, points: list[tuple[int, float]]) -> tuple[list[int], list[float]]:
        if points[-1][0] < self.last_step:
            points = [*points, (self.last_step, points[-1][1])]
        return [step for step, _ in points], [value for _, value in points]

    def column(self, name: str) -> tuple[list[int], list[float]]:
        """(steps, values) of one column of the metrics, rows without a finite value left out."""
        rows = [(row["step"], row.get(name)) for row in self.metrics]
        kept = [(step, v) for step, v in rows if v is not None and math.isfinite(v)]
        return [step for step, _ in kept], [float(value) for _, value in kept]


@dataclass(frozen=True)
class Condition:
    """One arm of a comparison: its finished runs, by seed, of the `asked` seeds."""

    name: str
    changes: tuple[str, ...]
    runs: list[Run]
    asked: int


@dataclass(frozen=True)
class Outcome:
    """Where a run stands: its summary or, before there is one, its newest row.

    `loss` and `metric` are on held-out data once finished; before that `loss` is the
    training loss. `figures` are what else the task had to say at the end.
    """

    finished: bool
    steps: int
    fma_initial: float
    fma_final: float
    parameters_initial: int | None
    parameters_final: int | None
    loss: float | None
    metric: float | None
    figures: Mapping[str, float]  # of the task's own
    reached_step: int | None
    training_fma: float | None
    wall_s: float | None
    returns: int = 0
    skipped: int = 0

    @property
    def compression(self) -> float:
        return self.fma_initial / self.fma_final if self.fma_final else math.inf


def load_run(folder: Path) -> Run:
    """Read a run folder; UserError, naming folder and file, where it is none."""
    if not is_folder(folder):
        why = "it is a file" if folder.is_file() else "no such folder"
        raise UserError(f"{str(folder)!r} is no run folder: {why}")
    for name in _NEEDED:
        if not (folder / name).is_file():
            raise UserError(f"{str(folder)!r} is no run folder: it has no {name}{_hint(folder)}")
    config, environment, initial = (_read(folder / name) for name in _NEEDED)
    summary = folder / "summary.json"
    return Run(
        path=folder,
        config=config,
        environment=environment,
        initial=initial,
        metrics=_read_log(folder / "metrics.jsonl"),
        events=_read_log(folder / "events.jsonl"),
        resumed=_read_log(folder / "resumed.jsonl"),
        summary=_read(summary, finite=False) if summary.exists() else None,
    )


def run_folders(paths: Sequence[Path]) -> list[Path]:
    """The runs that `paths` stand for: each is a run, a sweep's folder, or a folder of such."""
    found = [run for path in paths for run in (_runs_under(path) or [path])]
    return list(dict.fromkeys(found))


def outcome(run: Run) -> Outcome:
    """The figures a run is judged by."""
    if (summary := run.summary) is not None:
        return Outcome(
            finished=True,
            steps=summary["steps"],
            fma_initial=summary["fma_initial"],
            fma_final=summary["fma_final"],
            parameters_initial=summary["parameters_initial"],
            parameters_final=summary["parameters_final"],
            loss=summary["loss"],
            metric=summary["metric"]["value"],
            figures=summary.get("figures", {}),
            reached_step=summary["target_reached_step"],
            training_fma=summary["training_fma"],
            wall_s=summary["wall_s"],
            returns=summary.get("returns", 0),
            skipped=summary.get("skipped_steps", 0),
        )
    first: Mapping[str, Any] = run.metrics[0] if run.metrics else {}
    last: Mapping[str, Any] = run.metrics[-1] if run.metrics else {}
    # A first row that comes after a first drop no longer knows the size at birth.
    at_birth = first.get("fma") == run.initial["fma"]
    return Outcome(
        finished=False,
        steps=run.last_step,
        fma_initial=run.initial["fma"],
        fma_final=run.fma_trajectory()[1][-1],
        parameters_initial=first["parameters"] if at_birth else None,
        parameters_final=last.get("parameters"),
        loss=last.get("loss"),
        metric=last.get(run.metric_name),
        figures={},
        reached_step=None,
        training_fma=None,
        wall_s=last.get("wall_s"),
    )


def load_condition(folders: Sequence[Path]) -> list[Run]:
    """Read the runs of one condition, by seed; UserError unless they differ by seed alone."""
    if not folders:
        raise UserError("no run folder given")
    runs = sorted(map(load_run, folders), key=lambda run: run.seed)
    for before, run in pairwise(runs):
        check_same(before, run, "are not runs of one condition")
        if before.seed == run.seed:
            pair = f"{str(before.path)!r} and {str(run.path)!r}"
            raise UserError(f"{pair} are both of seed {run.seed}: give one of them")
    return runs


def check_finished(runs: Sequence[Run]) -> None:
    """UserError where a run has not come to its end."""
    for run in runs:
        if run.summary is None:
            raise UserError(f"{str(run.path)!r} is not finished: it has no summary.json")


def check_same(before: Run, run: Run, otherwise: str, only: Collection[str] | None = None) -> None:
    """UserError, saying `otherwise`, where two runs differ in a setting, or in one of `only`."""
    ours, theirs = settings(before), settings(run)
    # Of runs of other tasks little is alike: name that first.
    for key in sorted(ours.keys() & theirs.keys(), key=lambda key: (key != "task.name", key)):
        if ours[key] != theirs[key] and (only is None or key in only):
            raise UserError(
                f"{str(before.path)!r} and {str(run.path)!r} {otherwise}: {key} is "
                f"{ours[key]!r} in one and {theirs[key]!r} in the other"
            )


def settings(run: Run) -> dict[str, Any]:
    """Every setting that changes what a run's figures mean, except its seed."""
    sections = {key: dict(run.config[key]) for key in _SECTIONS}
    train = sections["train"]
    sections["train"] = {key: train[key] for key in _COURSE if key in train}
    return {f"{name}.{key}": v for name, values in sections.items() for key, v in values.items()}


def operator_count(widths: Mapping[str, int]) -> int:
    return len({name.split(".")[1] for name in widths if name.startswith("operators.")})


def _layer_widths(widths: Mapping[str, int]) -> dict[tuple[str, int], int]:
    """(kind, depth) -> extent, for the axes that belong to a layer."""
    found = {}
    for name, width in widths.items():
        if match := _LAYER_AXIS.search(name):
            found[match[2], int(match[1])] = width
    return found


def _read(path: Path, finite: bool = True) -> dict[str, Any]:
    return shaped(path, read_json(path, finite))


def _read_log(path: Path) -> tuple[dict[str, Any], ...]:
    return tuple(shaped_rows(path, read_rows(path)))


def _hint(folder: Path) -> str:
    """The runs in a folder that was taken for one."""
    inside = [str(run.relative_to(folder)) for run in _runs_under(folder)]
    return f"; there are runs under it: {', '.join(inside[:5])}" if inside else ""


def _runs_under(folder: Path) -> list[Path]:
    """The runs in a folder that is none itself: right under it, or in folders there."""
    if exists(folder / "initial.json"):
        return []
    levels = ("*/initial.json", "*/*/initial.json")
    return sorted(file.parent for level in levels for file in folder.glob(level))
