"""One run folder in memory: widths, work and metrics as functions of the training step.

Rearranges what the files hold. Reads no files except samples.npz, draws nothing and formats
nothing.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gaugelasso.errors import UserError
from gaugelasso.files.untrusted import read_arrays
from gaugelasso.runs.reading import OWN_LOOP
from gaugelasso.runs.targets import named_loss

# The axes of every layer, in the order of the network: attention, then MLP.
LAYER_KINDS = ("d_ai", "d_k", "d_v", "d_ao", "d_mi", "d_f", "d_mo")
# The axes that the network has once.
END_AXES = {"D": "D", "d_e": "embedding.d_e", "d_c": "classifier.d_c"}
AXIS_NAMES = {
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

# The first development builds of 0.1.0 wrote no "metric" into initial.json. Their rows in
# metrics.jsonl held these columns and the metric.
_COLUMNS_BESIDE_THE_METRIC = {
    "step", "phase", "loss", "fma", "parameters", "sites", "operators", "rho", "lr", "step_ms",
    "wall_s", "memory_mib",
}  # fmt: skip
_LAYER_AXIS = re.compile(r"_(\d+)\.(\w+)$")


@dataclass(frozen=True)
class Run:
    """One run folder at the time it was read; the run may still be in progress."""

    path: Path
    config: dict[str, Any]
    environment: dict[str, Any]
    initial: dict[str, Any]
    metrics: tuple[dict[str, Any], ...]
    events: tuple[dict[str, Any], ...]
    resumed: tuple[dict[str, Any], ...]
    summary: dict[str, Any] | None
    # The content of original.json, which `compress` writes for a pretrained model.
    original: dict[str, Any] | None = None
    # Rows of serving.json, which `bench RUN --inference` writes.
    serving: tuple[dict[str, Any], ...] = ()
    # Of the newest checkpoint of a run in progress; 0 for a finished run, whose logs say its end.
    checkpoint_step: int = 0

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def task(self) -> str:
        """The name of the task, or of its class in a module."""
        task = self.config["task"]
        return str(task["name"] if "name" in task else task["module"].rpartition(":")[2])

    @property
    def own_model(self) -> str:
        """The class of a model that is not the built-in transformer; else empty."""
        return str(self.initial.get("model_class", ""))

    @property
    def is_pretrained(self) -> bool:
        """Whether the run began with the weights of another model."""
        return "from" in self.config["model"]

    @property
    def original_loss(self) -> float | None:
        """The held-out loss of the model that the run began with; None if it was not measured."""
        return None if self.original is None else float(self.original["test"]["loss"])

    @property
    def original_metric(self) -> float | None:
        """The same of the metric."""
        if self.original is None or self.original["metric"] != self.metric_name:
            return None
        return float(self.original["test"]["bits"])

    @property
    def is_rotary(self) -> bool:
        """Whether a channel of d_k is a RoPE pair: by [model], else by the structure."""
        if "rope" in self.config["model"]:
            return bool(self.config["model"]["rope"])
        structure = self.initial.get("structure")
        operators = structure.get("operators", []) if isinstance(structure, dict) else []
        return any(isinstance(op, dict) and op.get("frequencies") for op in operators)

    @property
    def seed(self) -> int:
        """0 for an own loop, whose seed is not known."""
        return int(self.config["train"]["seed"])

    @property
    def is_own_loop(self) -> bool:
        """Whether a loop of the user's own recorded the run; its seed and data are not known."""
        return bool(self.config["task"].get("name") == OWN_LOOP)

    @property
    def told_by(self) -> str:
        """What tells the runs of a condition apart, as the head of a column: seed, or run."""
        return "run" if self.is_own_loop else "seed"

    @property
    def mark(self) -> str:
        """The seed; of an own loop the folder."""
        return str(self.path) if self.is_own_loop else str(self.seed)

    @property
    def title(self) -> str:
        return f"{self.told_by} {self.mark}"

    @property
    def accounting(self) -> str:
        return str(self.config["compress"]["accounting"])

    @property
    def costs_initial(self) -> dict[str, Any]:
        """FMA per token, bytes and milliseconds before; empty for early versions."""
        return dict(self.initial.get("costs", {}))

    @property
    def costs_final(self) -> dict[str, Any]:
        """The same of the final model; empty until the run is finished."""
        return dict((self.summary or {}).get("costs", {}))

    @property
    def loss_target(self) -> float | None:
        """The loss that is named; None if the target is another figure, or not measured yet."""
        target = self.config["target"]
        above, full = (target.get(key) for key in ("above_full", "reference_loss"))
        if above is not None and full is not None:
            return float((1 + above) * full)
        return named_loss(None if target["loss"] is None else float(target["loss"]))

    @property
    def metric_target(self) -> float | None:
        return self.config["target"].get("metric")

    @property
    def parameter_target(self) -> float | None:
        """The number of parameters that CoFi was given; None before the run is finished."""
        cofi = (self.summary or {}).get("cofi", {})
        return float(cofi["target"]) if cofi.get("objective") == "parameters" else None

    @property
    def fma_target(self) -> float:
        """The work per token that is named; 0 if none is."""
        return float(self.config["target"].get("fma", 0.0))

    @property
    def metric_name(self) -> str:
        for source in (self.summary or {}, self.initial):
            if "metric" in source:
                return str(source["metric"]["name"])
        row = self.metrics[0] if self.metrics else {}
        return next((key for key in row if key not in _COLUMNS_BESIDE_THE_METRIC), "metric")

    @property
    def metric_lower_is_better(self) -> bool:
        return bool(self.initial.get("metric", {}).get("lower_is_better", False))

    @property
    def metric_is_loss(self) -> bool:
        """Whether the metric equals the held-out loss; False until the run is finished."""
        summary = self.summary or {"loss": None}
        return summary["loss"] is not None and summary["loss"] == summary["metric"]["value"]

    def environment_values(self, key: str) -> list[Any]:
        """The values of one key of environment.json, at the start and at each resume."""
        return [
            each[key] for each in (self.environment, *self.resumed) if each.get(key) is not None
        ]

    def samples(self) -> dict[str, np.ndarray]:
        """Images from the task, [n, h, w, 3] by name; empty if the run has none."""
        path = self.path / "samples.npz"
        arrays = read_arrays(path) if path.exists() else {}
        for name, images in arrays.items():
            if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3:
                raise UserError(f"{str(path)!r}: {name!r} is not an array of RGB images")
        return arrays

    @property
    def had_structural_event(self) -> bool:
        """Whether the penalty was active: an event took place that is not a rollback."""
        return any(event.get("returned_to") is None for event in self.events)

    @property
    def last_step(self) -> int:
        """The newest step in the logs, or of the newest checkpoint if it is later."""
        logged = (rows[-1]["step"] for rows in (self.metrics, self.events) if rows)
        return max([self.checkpoint_step, *logged])

    @property
    def layers(self) -> int:
        depths = [depth + 1 for _, depth in _layer_widths(self.initial["widths"])]
        return max([self.initial.get("structure", {}).get("layers", 0), *depths])

    @property
    def cooldown_start(self) -> int | None:
        """The step at which cooldown starts; None before it.

        Exact to one logging interval where the summary is of another cooldown, or not there yet.
        """
        before, frozen = 0, (self.summary or {}).get("frozen_step")
        for row in self.metrics:
            if row["phase"] == "cooldown":
                if frozen is not None and before <= frozen <= row["step"]:
                    return int(frozen)
                return before
            before = row["step"]
        return None

    @property
    def frozen_in_cooldown(self) -> bool:
        """Whether nothing is cut in cooldown. A target of the final model is pressed to its end."""
        return bool(self.config["target"].get("hold", "pressed") == "pressed")

    @property
    def before_cooldown(self) -> dict[str, Any] | None:
        """The last row of the compression phase, with the training loss; None without one."""
        row = next((row for row in reversed(self.metrics) if row["phase"] == "compression"), None)
        if row is None:
            return None
        metric = row.get(self.metric_name)
        return {"step": row["step"], "loss": row["loss"], "metric": metric, "fma": row["fma"]}

    def _changes(self, key: str) -> list[tuple[int, Any]]:
        """(step, widths or fma) of what the run began with, and after each event."""
        # A rival cuts before the first step too.
        later = [(max(event["step"], 1), event[key]) for event in self.events]
        return [(0, self.initial[key]), *later]

    def widths_at(self, step: int) -> dict[str, int]:
        """Axis name -> surviving indices after `step`; a removed operator has no axes."""
        return next(widths for at, widths in reversed(self._changes("widths")) if at <= step)

    def depth_widths(self, kind: str, step: int) -> list[int]:
        """Width of one kind of axis in every layer after `step`; 0 where there is no operator."""
        widths = _layer_widths(self.widths_at(step))
        return [widths.get((kind, depth), 0) for depth in range(self.layers)]

    def axis_trajectory(self, axis: str) -> tuple[list[int], list[float]]:
        """(steps, widths) of one axis from step 0, constant between the points."""
        points = [(step, float(w.get(axis, 0))) for step, w in self._changes("widths")]
        return self._up_to_last_step(points)

    def fma_trajectory(self) -> tuple[list[int], list[float]]:
        """(steps, work per token) from step 0, constant between the points."""
        return self._up_to_last_step(self._changes("fma"))

    def _up_to_last_step(self, points: list[tuple[int, float]]) -> tuple[list[int], list[float]]:
        if points[-1][0] < self.last_step:
            points = [*points, (self.last_step, points[-1][1])]
        return [step for step, _ in points], [value for _, value in points]

    def column(self, name: str) -> tuple[list[int], list[float]]:
        """(steps, values) of one column of the metrics; rows without a finite value are skipped."""
        rows = [(row["step"], row.get(name)) for row in self.metrics]
        kept = [(step, v) for step, v in rows if v is not None and math.isfinite(v)]
        return [step for step, _ in kept], [float(value) for _, value in kept]

    def evaluations(self) -> tuple[list[int], list[float]]:
        """(steps, metric) where it was measured; the rows in between repeat it."""
        every = self.config["train"]["eval_every"]
        points = list(zip(*self.column(self.metric_name), strict=True))
        kept = [(step, v) for step, v in points if step % every == 0 or (step, v) == points[-1]]
        return [step for step, _ in kept], [value for _, value in kept]


def operator_count(widths: Mapping[str, int]) -> int:
    return len({name.split(".")[1] for name in widths if name.startswith("operators.")})


def _layer_widths(widths: Mapping[str, int]) -> dict[tuple[str, int], int]:
    """(kind, depth) -> width, for the axes that belong to a layer."""
    found = {}
    for name, width in widths.items():
        if match := _LAYER_AXIS.search(name):
            found[match[2], int(match[1])] = width
    return found
