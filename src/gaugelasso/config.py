"""Configuration: TOML in, checked dataclasses out.

Sections [task], [model], [target], [compress], [train]. Every key is a field of a
dataclass; an unknown key is refused with the nearest valid name.
"""

import contextlib
import dataclasses
import difflib
import math
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gaugelasso.compress.options import CompressorOptions
from gaugelasso.errors import UserError, errors_of, first_line
from gaugelasso.files.untrusted import MOST_VALUES, read_plain
from gaugelasso.models.spec import SpecError, TransformerSpec
from gaugelasso.runs.reading import read_json
from gaugelasso.tasks import TASKS, Task

# Wider than any machine this is meant for: surely a slip of the finger.
_ABSURD = 1_000_000
_DEEPEST = 10_000
_MOST_WEIGHTS = 1e11
_MOST_VALUES = 1e11
_LARGEST = 2**17  # bytes of a TOML file, of which all settings fill a few thousand


@dataclass(frozen=True)
class ModelConfig:
    """[model]: the uniform transformer that compression starts from."""

    width: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 0  # 0: as many as heads
    d_k: int = 32
    d_v: int = 32
    d_f: int = 256
    rope: bool = True
    rope_base: float = 10_000.0
    positions: bool = False
    norm: Literal["slow", "tied"] = "slow"

    def __post_init__(self) -> None:
        for key in ("width", "heads", "d_k", "d_v", "d_f"):
            _in_range(f"model.{key}", getattr(self, key), 1, _ABSURD)
        _in_range("model.layers", self.layers, 1, _DEEPEST)
        _in_range("model.kv_heads", self.kv_heads, 0, self.heads)
        if not 0 < self.rope_base < math.inf:
            raise UserError(f"model.rope_base = {self.rope_base}: must be more than 0")

    def spec(self, task: Task) -> TransformerSpec:
        try:
            return TransformerSpec.uniform(
                width=self.width,
                layers=self.layers,
                heads=self.heads,
                kv_heads=self.kv_heads or None,
                d_k=self.d_k,
                d_v=self.d_v,
                d_f=self.d_f,
                rope=self.rope,
                rope_base=self.rope_base,
                positions=self.positions,
                norm=self.norm,
                length=task.length,
                inputs=task.inputs,
                outputs=task.outputs,
                input_kind=task.input_kind,
                causal=task.causal,
            )
        except SpecError as error:
            raise UserError(f"[model]: {error}") from None


@dataclass(frozen=True)
class TargetConfig:
    """[target]: the loss to hold, and optionally the work per token to stop at (0: none)."""

    loss: float = 0.05
    fma: float = 0.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.loss):
            raise UserError(f"target.loss = {self.loss}: must be a finite number")
        if not 0 <= self.fma < math.inf:
            raise UserError(f"target.fma = {self.fma}: must be 0 (no target) or more")


@dataclass(frozen=True)
class TrainConfig:
    """[train]: how long, on what, and what is written down."""

    seed: int = 42
    steps: int = 30_000
    warmup: int = 500
    cooldown: int = 5_000
    saturation: int = 0
    lr_min: float = 1e-4
    batch: int = 32
    accumulate: int = 1
    canonical: bool = False
    device: str = "auto"
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    graph: bool = True
    fused: bool = True
    probe: bool = True
    log_every: int = 50
    eval_every: int = 1_000
    eval_batches: int = 8
    final_batches: int = 64
    checkpoint_every: int = 1_000
    patience: int = 1_000
    skip_limit: int = 20
    checkpoint_keep: int = 2
    threads: int = 0  # 0: leave it to torch
    rank_timeout: int = 20

    def __post_init__(self) -> None:
        for key in ("steps", "batch", "accumulate", "log_every", "eval_every", "eval_batches",
                    "skip_limit", "final_batches", "checkpoint_every"):  # fmt: skip
            _in_range(f"train.{key}", getattr(self, key), 1, 10**9)
        # One alone could not be gone back from if it is damaged.
        _in_range("train.checkpoint_keep", self.checkpoint_keep, 2, 10**9)
        _in_range("train.threads", self.threads, 0, 1024)
        _in_range("train.rank_timeout", self.rank_timeout, 1, 86_400)
        for key in ("seed", "warmup", "cooldown", "saturation", "patience"):
            _in_range(f"train.{key}", getattr(self, key), 0, 2**62)
        if not 0 <= self.lr_min < math.inf:
            raise UserError(f"train.lr_min = {self.lr_min}: must not be negative")
        if self.warmup + self.cooldown > self.steps:
            raise UserError(
                f"train.warmup = {self.warmup} and train.cooldown = {self.cooldown} do not fit "
                f"into train.steps = {self.steps}"
            )


@dataclass(frozen=True)
class Config:
    """One run, whole."""

    task_name: str
    task: Task
    model: ModelConfig = field(default_factory=ModelConfig)
    target: TargetConfig = field(default_factory=TargetConfig)
    compress: CompressorOptions = field(default_factory=CompressorOptions)
    train: TrainConfig = field(default_factory=TrainConfig)

    def to_dict(self) -> dict[str, Any]:
        """The resolved config, in the shape of the TOML file."""
        return {
            "task": {"name": self.task_name, **dataclasses.asdict(self.task)},  # type: ignore[call-overload]
            **{key: dataclasses.asdict(getattr(self, key)) for key in _SECTIONS},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Config":
        if not isinstance(data, Mapping):
            raise UserError(f"a config is a table of sections, not {type(data).__name__}")
        _no_strangers("", data, ["task", *_SECTIONS])
        task = data.get("task", {})
        if not isinstance(task, Mapping):
            raise UserError(f"[task] must be a section of key = value lines, not {task!r}")
        known = ", ".join(TASKS)
        if "name" not in task:
            raise UserError(f"task.name is missing; name in [task] one of: {known}")
        name = task["name"]
        if not isinstance(name, str) or name not in TASKS:
            raise UserError(f"task.name = {name!r} is no task; choose one of: {known}")
        _no_strangers("task", task, ["name", *_names(TASKS[name])])
        task = {key: value for key, value in task.items() if key != "name"}
        sections = {
            key: _build(key, section, data.get(key, {})) for key, section in _SECTIONS.items()
        }
        config = cls(task_name=name, task=_build("task", TASKS[name], task), **sections)
        _check_size(config)
        _check_places(config)
        config.model.spec(config.task)  # fails on widths that cannot be built
        return config


_SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "target": TargetConfig,
    "compress": CompressorOptions,
    "train": TrainConfig,
}


def _check_size(config: Config) -> None:
    """Refuse what would take terabytes before anything is allocated."""
    model, task, train = config.model, config.task, config.train
    heads = model.heads * (2 * model.d_k + 2 * model.d_v)
    weights = model.width * (task.inputs + task.outputs + task.length * model.positions)
    weights += model.layers * model.width * (heads + 3 * model.d_f)
    if weights > _MOST_WEIGHTS:
        raise UserError(
            f"[model] and [task] make {weights:.2g} weights, more than the {_MOST_WEIGHTS:.0e} "
            "this is meant for; lower the widths or the vocabulary"
        )
    # A structure names the sites that every operator reads and writes, and must be read again.
    named = model.layers * (4 * model.width + model.d_k) + 3 * model.width
    if named > MOST_VALUES:
        raise UserError(
            f"model.layers = {model.layers} of model.width = {model.width} make a structure of "
            f"{named:.2g} entries, more than {MOST_VALUES:.1e}; lower one of them"
        )
    values = train.batch * task.length * max(model.width, model.d_f, task.outputs)
    if values > _MOST_VALUES:
        raise UserError(
            f"train.batch = {train.batch} sequences of task.length = {task.length} make layers of "
            f"{values:.2g} values, more than {_MOST_VALUES:.0e}; lower one, or use train.accumulate"
        )


def _check_places(config: Config) -> None:
    """A hidden patch knows itself by its place alone, and an image has no order in a line."""
    model = config.model
    if config.task.input_kind == "masked_patches" and (model.rope or not model.positions):
        raise UserError(
            f"task {config.task_name!r} hides patches, which know themselves by a learned place "
            "alone: set model.positions = true and model.rope = false"
        )


def load_config(path: Path, changes: Mapping[str, str] | None = None) -> Config:
    """Read a TOML file and apply `section.key = value` changes, values in TOML syntax."""
    try:
        data = tomllib.loads(read_plain(path, _LARGEST).decode())
    except FileNotFoundError:
        raise UserError(f"config {str(path)!r}: no such file") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"config {str(path)!r}: not valid TOML: {error}") from None
    except RecursionError:
        raise UserError(f"config {str(path)!r}: not valid TOML: nested too deeply") from None
    except (OSError, ValueError) as error:
        raise UserError(f"config {str(path)!r}: cannot be read ({first_line(error)})") from None
    # With changes, what is wrong may as well be one of them.
    with contextlib.nullcontext() if changes else errors_of(path):
        return changed(data, changes or {})


def run_config(run: Path) -> Config:
    """The resolved config that a run folder holds."""
    path = run / "config.json"
    data = read_json(path)
    with errors_of(path):
        return Config.from_dict(data)


def changed(data: dict[str, Any], changes: Mapping[str, str]) -> Config:
    """The config of this data after `section.key = value` changes."""
    for key, text in changes.items():
        section, dot, leaf = key.partition(".")
        if not dot:
            raise UserError(f"--set {key}={text}: name the section too, as in train.steps=1000")
        table = data.setdefault(section, {})
        if not isinstance(table, dict):
            raise UserError(f"[{section}] must be a section")
        table[leaf] = _parse(text)
    return Config.from_dict(data)


def _parse(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text  # a bare word is a string


def _build(section: str, cls: type, values: Any) -> Any:
    if not isinstance(values, Mapping):
        raise UserError(f"[{section}] must be a section of key = value lines, not {values!r}")
    hints = typing.get_type_hints(cls)
    _no_strangers(section, values, _names(cls))
    return cls(
        **{key: _typed(f"{section}.{key}", value, hints[key]) for key, value in values.items()}
    )


def _names(cls: type) -> list[str]:
    return [f.name for f in dataclasses.fields(cls)]


def _no_strangers(section: str, values: Mapping[str, Any], names: list[str]) -> None:
    for key in values:
        if key not in names:
            where = f"{section}.{key}" if section else f"[{key}]"
            near = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"valid: {', '.join(sorted(names))}"
            raise UserError(f"unknown key {where}; {hint}")


def _typed(key: str, value: Any, hint: Any) -> Any:
    """The value if it fits the annotation; whole numbers fit a float."""
    if typing.get_origin(hint) is Literal:
        choices = typing.get_args(hint)
        if value not in choices:
            raise UserError(f"{key} = {value!r}; choose one of: {', '.join(map(str, choices))}")
        return value
    if isinstance(hint, types.UnionType):
        raise TypeError(f"{key}: config fields have one type")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not hint:
        raise UserError(f"{key} = {value!r}: must be {_SAID[hint]}")
    return value


_SAID = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}


def _in_range(key: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise UserError(f"{key} = {value}: must be between {low} and {high}")
