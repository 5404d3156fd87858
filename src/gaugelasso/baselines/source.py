"""The run that a method begins with or learns from: finished, with its trained model."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gaugelasso.axes import Compressible
from gaugelasso.config import Config, run_config
from gaugelasso.config.plain import PLAIN_KEYS, PRESSURE_KEYS
from gaugelasso.config.target import TargetConfig
from gaugelasso.errors import UserError
from gaugelasso.models import Transformer
from gaugelasso.runs.checkpoint import load_model, load_structure, required
from gaugelasso.runs.reading import check_has_summary, exists, read_json
from gaugelasso.runs.structures import Structure


class TrainedModel(Structure):
    """The structure of a run that is built with the run's weights."""

    def build(self, seed: int = 0, weights: Path | None = None) -> Compressible:
        return load_model(self.path)

    @classmethod
    def of(cls, run: Path) -> "TrainedModel":
        structure = load_structure(run)
        return cls(run, structure.data, structure.model_class)


@dataclass(frozen=True)
class Source:
    """A finished run. Its training counts as the first part of the method's training.

    `fingerprint` identifies the model that it ended with, wherever the folder is.
    """

    run: Path
    summary: Mapping[str, Any]
    fingerprint: str
    schedule: Mapping[str, int] | None

    @classmethod
    def of(cls, run: Path) -> "Source":
        check_has_summary(run)
        ended = required(run)  # raises if the weights that the run ended with are lost
        summary = read_json(run / "summary.json", finite=False)
        return cls(run, summary, ended.fingerprint(), schedule(run, summary))

    @property
    def training_fma(self) -> float:
        return float(self.summary["training_fma"])

    @property
    def wall_s(self) -> float:
        return float(self.summary["wall_s"])

    @property
    def batches(self) -> int:
        """How many training batches were drawn before its end, those of its own source included."""
        earlier = int((self.summary.get("source") or {}).get("batches", 0))
        return earlier + int(self.summary["steps"]) * run_config(self.run).train.accumulate

    @property
    def is_full(self) -> bool:
        """Whether nothing was cut from its model."""
        return bool(self.summary["fma_final"] == self.summary["fma_initial"])

    def to_dict(self) -> dict[str, Any]:
        """What the summary of a method says of it."""
        keys = ("method", "seed", "steps", "fma_final", "loss", "training_fma", "wall_s")
        found = {"run": str(self.run), **{key: self.summary.get(key) for key in keys}}
        return {**found, "schedule": self.schedule}


def schedule(run: Path, summary: Mapping[str, Any]) -> dict[str, int] | None:
    """Steps and warm-up of a run, with those of the run that it began with.

    None if they are not known: early versions did not write those of the other run, and it is not
    in its folder any more.
    """
    steps, source = int(summary["steps"]), summary.get("source")
    if source is None:
        return {"steps": steps, "warmup": run_config(run).train.warmup}
    before = source.get("schedule")
    if before is None and exists(path := Path(source["run"]) / "summary.json"):
        found = read_json(path, finite=False)
        same = isinstance(found, dict) and found.get("steps") == source.get("steps")
        before = schedule(path.parent, found) if same else None
    return before and {"steps": before["steps"] + steps, "warmup": before["warmup"]}


def known_schedule(run: Path, summary: Mapping[str, Any]) -> dict[str, int]:
    """The same; UserError if it is not known."""
    found = schedule(run, summary)
    if found is None:
        raise UserError(
            f"{str(run / 'summary.json')!r}: no source.schedule, the steps and warm-up of the run "
            f"in {summary['source']['run']!r}, which early versions did not write; move that run "
            "back there, or make this one again"
        )
    return found


def no_effect(key: str, value: str, what: str) -> UserError:
    """The error of a change that a method without pressure would not notice."""
    return UserError(
        f"--set {key}={value}: {what} has no pressure and makes no use of {key}; leave it out"
    )


def transformer_of(run: Path, what: str) -> Transformer:
    """The model of a run; UserError with `what` unless it is the built-in transformer."""
    model = load_model(run)
    if not isinstance(model, Transformer):
        raise UserError(
            f"{str(run)!r} is a run of a model of its own; {what} the built-in transformer only"
        )
    return model


def settings_of(
    run: Path,
    changes: Mapping[str, str],
    target: TargetConfig,
    what: str,
    without_effect: Collection[str] = (),
) -> Config:
    """The config of a run with another target and no pressure, after changes.

    UserError if a change is one of what the method takes from the run or sets itself, or is
    `without_effect` on the method.
    """
    for key, value in changes.items():
        if key in PLAIN_KEYS or key.startswith(("task.", "model.", "target.")):
            raise UserError(
                f"--set {key}={value}: {what} takes {key} from its run or its options; "
                "other keys of [compress] and [train] can be set"
            )
        if key in (*PRESSURE_KEYS, *without_effect):
            raise no_effect(key, value, what)
    config = run_config(run, changes)
    # The utility by which channels are ranked is that of the method itself.
    compress = replace(
        config.compress, solver="fixed", rho=0.0, penalty="symmetric", calibration="efficiency",
        exchange=0, removal="pressure", shape="free",
    )  # fmt: skip
    return replace(config, target=target, compress=compress)
