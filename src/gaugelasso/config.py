"""Configuration of a run: reads TOML or JSON into checked dataclasses.

The sections are [task], [model], [target], [compress] and [train]. Every key is a field of a
dataclass. An unknown key is refused with the nearest valid name.
"""

import contextlib
import dataclasses
import math
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gaugelasso.compress.options import CompressorOptions
from gaugelasso.errors import UserError, errors_of, first_line
from gaugelasso.files.typed import build, check_keys_known, field_names
from gaugelasso.files.untrusted import MOST_VALUES, read_plain
from gaugelasso.models.spec import SpecError, TransformerSpec
from gaugelasso.runs.folder import CONFIG_SECTIONS
from gaugelasso.runs.reading import read_json
from gaugelasso.tasks import TASKS, Task

# Larger values are typing errors: no supported machine can train such a model.
_MAX_WIDTH = 1_000_000
_MAX_LAYERS = 10_000
_MAX_WEIGHTS = 1e11
_MAX_ACTIVATIONS = 1e11
_MAX_FILE_BYTES = 2**17


@dataclass(frozen=True)
class ModelConfig:
    """[model]: the initial transformer, with the same widths in every layer."""

    width: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 0  # 0: the same as heads
    d_k: int = 32
    d_v: int = 32
    d_f: int = 256
    rope: bool = True
    rope_base: float = 10_000.0
    positions: bool = False
    norm: Literal["slow", "tied"] = "slow"

    def __post_init__(self) -> None:
        for key in ("width", "heads", "d_k", "d_v", "d_f"):
            _in_range(f"model.{key}", getattr(self, key), 1, _MAX_WIDTH)
        _in_range("model.layers", self.layers, 1, _MAX_LAYERS)
        _in_range("model.kv_heads", self.kv_heads, 0, self.heads)
        if not 0 < self.rope_base < math.inf:
            raise UserError(f"model.rope_base = {self.rope_base}: must be a finite number above 0")

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
    """[target]: the loss to meet, and optionally the work per token to stop at (0: none)."""

    loss: float = 0.05
    fma: float = 0.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.loss):
            raise UserError(f"target.loss = {self.loss}: must be a finite number")
        if not 0 <= self.fma < math.inf:
            raise UserError(
                f"target.fma = {self.fma}: must be 0 (no work target) or a finite number above 0"
            )


@dataclass(frozen=True)
class TrainConfig:
    """[train]: length and phases, batches, device, evaluation, logging and checkpoints."""

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
    threads: int = 0  # 0: the default of torch
    rank_timeout: int = 20

    def __post_init__(self) -> None:
        for key in ("steps", "batch", "accumulate", "log_every", "eval_every", "eval_batches",
                    "skip_limit", "final_batches", "checkpoint_every"):  # fmt: skip
            _in_range(f"train.{key}", getattr(self, key), 1, 10**9)
        # With a single checkpoint, a damaged one could not be replaced by an older one.
        _in_range("train.checkpoint_keep", self.checkpoint_keep, 2, 10**9)
        _in_range("train.threads", self.threads, 0, 1024)
        _in_range("train.rank_timeout", self.rank_timeout, 1, 86_400)
        for key in ("seed", "warmup", "cooldown", "saturation", "patience"):
            _in_range(f"train.{key}", getattr(self, key), 0, 2**62)
        if not 0 <= self.lr_min < math.inf:
            raise UserError(f"train.lr_min = {self.lr_min}: must be a finite number of 0 or more")
        if self.warmup + self.cooldown > self.steps:
            raise UserError(
                f"train.warmup = {self.warmup} and train.cooldown = {self.cooldown} do not fit "
                f"into train.steps = {self.steps}"
            )


@dataclass(frozen=True)
class Config:
    """The complete configuration of one run."""

    task_name: str
    task: Task
    model: ModelConfig = field(default_factory=ModelConfig)
    target: TargetConfig = field(default_factory=TargetConfig)
    compress: CompressorOptions = field(default_factory=CompressorOptions)
    train: TrainConfig = field(default_factory=TrainConfig)

    def to_dict(self) -> dict[str, Any]:
        """The resolved config with the sections of the TOML file."""
        return {
            "task": {"name": self.task_name, **dataclasses.asdict(self.task)},  # type: ignore[call-overload]
            **{key: dataclasses.asdict(getattr(self, key)) for key in _SECTIONS},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Config":
        """The checked config of these sections; UserError names the key that is wrong."""
        if not isinstance(data, Mapping):
            raise UserError(f"a config must be a table of sections, not {type(data).__name__}")
        check_keys_known("", data, CONFIG_SECTIONS)
        task = data.get("task", {})
        if not isinstance(task, Mapping):
            raise UserError(f"[task] must be a section of key = value lines, not {task!r}")
        known = ", ".join(TASKS)
        if "name" not in task:
            raise UserError(f"task.name is missing; set it in [task] to one of: {known}")
        name = task["name"]
        if not isinstance(name, str) or name not in TASKS:
            raise UserError(f"task.name = {name!r} is unknown; choose one of: {known}")
        check_keys_known("task", task, ["name", *field_names(TASKS[name])])
        task = {key: value for key, value in task.items() if key != "name"}
        sections = {
            key: build(key, section, data.get(key, {})) for key, section in _SECTIONS.items()
        }
        config = cls(task_name=name, task=build("task", TASKS[name], task), **sections)
        _check_size(config)
        _check_positions(config)
        config.model.spec(config.task)  # raises for widths that cannot be built
        return config


# Sections with a fixed dataclass; that of [task] depends on task.name.
_SECTIONS: dict[str, type] = {
    name: typing.get_type_hints(Config)[name] for name in CONFIG_SECTIONS if name != "task"
}


def _check_size(config: Config) -> None:
    """UserError, before anything is allocated, for a model that would take terabytes."""
    model, task, train = config.model, config.task, config.train
    heads = model.heads * (2 * model.d_k + 2 * model.d_v)
    weights = model.width * (task.inputs + task.outputs + task.length * model.positions)
    weights += model.layers * model.width * (heads + 3 * model.d_f)
    if weights > _MAX_WEIGHTS:
        raise UserError(
            f"[model] and [task] make {weights:.2g} weights, more than the limit of "
            f"{_MAX_WEIGHTS:.0e}; lower the widths or the vocabulary"
        )
    # The structure file lists the sites of every operator, and reading it back has a limit.
    entries = model.layers * (4 * model.width + model.d_k) + 3 * model.width
    if entries > MOST_VALUES:
        raise UserError(
            f"model.layers = {model.layers} with model.width = {model.width} make a structure of "
            f"{entries:.2g} entries, more than the limit of {MOST_VALUES:.1e}; lower one of them"
        )
    values = train.batch * task.length * max(model.width, model.d_f, task.outputs)
    if values > _MAX_ACTIVATIONS:
        raise UserError(
            f"train.batch = {train.batch} sequences of task.length = {task.length} make "
            f"{values:.2g} activations per layer, more than the limit of {_MAX_ACTIVATIONS:.0e}; "
            "lower one of them, or use train.accumulate"
        )


def _check_positions(config: Config) -> None:
    """UserError unless masked patches have learned positions.

    A masked patch is identified by its position alone, and RoPE assumes a linear order.
    """
    model = config.model
    if config.task.input_kind == "masked_patches" and (model.rope or not model.positions):
        raise UserError(
            f"task {config.task_name!r} masks patches, which need learned positions: "
            "set model.positions = true and model.rope = false"
        )


def load_config(path: Path, changes: Mapping[str, str] | None = None) -> Config:
    """Read a TOML file and apply `section.key = value` changes, values in TOML syntax."""
    try:
        data = tomllib.loads(read_plain(path, _MAX_FILE_BYTES).decode())
    except FileNotFoundError:
        raise UserError(f"config {str(path)!r}: no such file") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"config {str(path)!r}: not valid TOML: {error}") from None
    except RecursionError:
        raise UserError(f"config {str(path)!r}: not valid TOML: nested too deeply") from None
    except (OSError, ValueError) as error:
        raise UserError(f"config {str(path)!r}: cannot be read ({first_line(error)})") from None
    # Without changes, an error can only come from the file: name it.
    with contextlib.nullcontext() if changes else errors_of(path):
        return changed(data, changes or {})


def run_config(run: Path) -> Config:
    """The resolved config of a run folder."""
    path = run / "config.json"
    data = read_json(path)
    with errors_of(path):
        return Config.from_dict(data)


def changed(data: dict[str, Any], changes: Mapping[str, str]) -> Config:
    """The config of these sections after `section.key = value` changes."""
    for key, text in changes.items():
        section, dot, leaf = key.partition(".")
        if not dot:
            raise UserError(f"--set {key}={text}: name the section too, as in train.steps=1000")
        table = data.setdefault(section, {})
        if not isinstance(table, dict):
            raise UserError(f"[{section}] must be a section of key = value lines")
        table[leaf] = _parse(text)
    return Config.from_dict(data)


def _parse(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text  # a bare word is a string


def _in_range(key: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise UserError(f"{key} = {value}: must be between {low} and {high}")
