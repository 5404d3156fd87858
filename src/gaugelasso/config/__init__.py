"""Configuration of a run: reads TOML or JSON into checked dataclasses.

The sections are [task], [model], [target], [compress] and [train]. Every key is a field of a
dataclass. An unknown key is refused with the nearest valid name.
"""

import contextlib
import dataclasses
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gaugelasso.compress.defaults import matrix_sizes
from gaugelasso.compress.options import RunOptions
from gaugelasso.config.activations import check_activations
from gaugelasso.config.auto import course_defaults
from gaugelasso.config.base import BaseModel, Folder, find_base
from gaugelasso.config.model import ModelConfig, check_positions, check_size
from gaugelasso.config.sections import TrainConfig
from gaugelasso.config.target import FIGURES, TargetConfig
from gaugelasso.errors import UserError, errors_of, first_line
from gaugelasso.files.tokenizer import NAME as TOKENIZER
from gaugelasso.files.typed import build, check_keys_known
from gaugelasso.files.untrusted import read_plain
from gaugelasso.models.own import OwnModel, find_model
from gaugelasso.plugins import NamedBy, Reference, source_digest
from gaugelasso.runs.folder import CONFIG_SECTIONS
from gaugelasso.runs.reading import OWN_LOOP, exists, is_imported, read_json
from gaugelasso.tasks import TASKS, TOKEN_TASKS, Task
from gaugelasso.tasks.own import find_task, sequences

_MAX_FILE_BYTES = 2**17


@dataclass(frozen=True)
class Config:
    """The complete configuration of one run."""

    task_name: str
    task: Task
    model: ModelConfig | OwnModel | BaseModel = field(default_factory=ModelConfig)
    target: TargetConfig = field(default_factory=TargetConfig)
    compress: RunOptions = field(default_factory=RunOptions)
    train: TrainConfig = field(default_factory=TrainConfig)
    task_module: str = ""  # in place of the name, for a task that a module defines

    def to_dict(self) -> dict[str, Any]:
        """The resolved config with the sections of the TOML file."""
        named = {"module": self.task_module} if self.task_module else {"name": self.task_name}
        own = {} if isinstance(self.model, ModelConfig) else {"model": self.model.to_dict()}
        sections = [key for key in _SECTIONS if key not in own]
        return {
            "task": named | dataclasses.asdict(self.task),  # type: ignore[call-overload]
            **own,
            **{key: dataclasses.asdict(getattr(self, key)) for key in sections},
        }

    def code(self) -> dict[str, str]:
        """Section -> SHA-256 of the file with its code, where that is not of this package."""
        things: dict[str, Any] = {}
        if type(self.task) not in TASKS.values():
            things["task"] = type(self.task)
        if isinstance(self.model, OwnModel):
            things["model"] = self.model.builder
        digests = {key: source_digest(thing) for key, thing in things.items()}
        return {key: digest for key, digest in digests.items() if digest is not None}

    def weights_from(self, base: bool = True) -> dict[str, Path]:
        """The folders whose weights a run takes, by what a reader calls them.

        Those of `base`, the model of model.from, only if it does not begin with another structure.
        """
        found = dict[Path, str]()
        if self.train.teacher:
            found[Folder(self.train.teacher, "train.teacher").path] = "the run of train.teacher"
        if base and isinstance(self.model, BaseModel):  # often the same
            found[self.model.base.path] = "the run of model.from"
        return {what: path for path, what in found.items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], by: NamedBy | None = None) -> "Config":
        """The checked config of these sections; UserError names the key that is wrong.

        Relative paths of modules start from the folder in `by`, or from the working directory.
        """
        by = by or NamedBy(Path.cwd())
        if not isinstance(data, Mapping):
            raise UserError(f"a config must be a table of sections, not {type(data).__name__}")
        check_keys_known("", data, CONFIG_SECTIONS)
        tables = {key: data.get(key, {}) for key in _SECTIONS}
        task, base = data.get("task", {}), find_base(tables["model"])
        found = find_task(base.task_keys(task) if base else task, by)
        model = base.resolved(found.task) if base else _model(tables["model"], by)
        target = build("target", TargetConfig, tables["target"])
        if target.hold == "final":
            tables |= course_defaults(tables, lambda: _matrix_sizes(model, found.task))
        sections: dict[str, Any] = {"model": model, "target": target}
        sections |= {
            key: build(key, section, tables[key])
            for key, section in _SECTIONS.items()
            if key not in sections
        }
        config = cls(found.name, found.task, **sections, task_module=found.module)
        _check_teacher(config)
        if isinstance(config.model, ModelConfig):
            check_size(config.model, sequences(config.task), config.train.batch)
            check_positions(config.model, sequences(config.task), config.task_name)
            spec = config.model.spec(config.task)  # raises for widths that cannot be built
            _check_serving(config, spec.length)
        elif isinstance(config.model, BaseModel):
            fits = sequences(config.task)
            check_activations(fits.outputs, fits.length, config.train.batch)
            _check_serving(config, config.model.context)
        return config


def _check_serving(config: Config, longest: int) -> None:
    """UserError if the cache of a served model is to hold more than its positions."""
    if (length := config.compress.serving_length) > longest:
        raise UserError(
            f"compress.serving_length = {length}: the model's sequences have {longest} tokens at "
            "most; give that or less, or 0 for all of them"
        )


def _check_teacher(config: Config) -> None:
    train, pretrained = config.train, isinstance(config.model, BaseModel)
    if train.distill and not (train.teacher or pretrained):
        raise UserError(
            f"train.distill = {train.distill}: there is nothing to distill from; name a run or an "
            "imported model in train.teacher, or use distill = 0"
        )
    if train.teacher and not train.distill:
        raise UserError(
            f"train.teacher = {train.teacher!r}: nothing is distilled from it; set train.distill "
            "to the share of its outputs, as 0.5"
        )


def _model(section: Any, by: NamedBy) -> ModelConfig | OwnModel:
    """The model of a [model] section without `from`."""
    own = find_model(section, by)
    if own is None and isinstance(section, Mapping):
        # `name` can only be that of the built-in transformer here.
        section = {key: value for key, value in section.items() if key != "name"}
    return own or build("model", ModelConfig, section)


def _matrix_sizes(model: ModelConfig | OwnModel | BaseModel, task: Task) -> list[int]:
    """The numbers of elements of the weight matrices; a model of the user has to be built."""
    if isinstance(model, ModelConfig):
        return model.matrix_sizes(task)
    if isinstance(model, BaseModel):
        return model.matrix_sizes()
    return matrix_sizes(model.build(task, seed=0))


# Sections with a fixed dataclass; that of [task] depends on its name or module.
_SECTIONS: dict[str, type] = {
    name: typing.get_type_hints(Config)[name] for name in CONFIG_SECTIONS if name != "task"
} | {"model": ModelConfig}


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
        return changed_config(data, changes or {}, NamedBy(path.absolute().parent))


def run_config(run: Path, changes: Mapping[str, str] | None = None) -> Config:
    """The resolved config of a run folder, after `section.key = value` changes.

    The run folder may name modules, which are imported, and does not bring them (`plugins`).
    """
    path = run / "config.json"
    if is_imported(run):
        raise UserError(
            f"{str(run)!r} is an imported model and no run; train from it with model.from, or "
            "measure it with gaugelasso eval --data"
        )
    data = read_json(path)
    _check_names_task(data, run, changes or {})
    _use_own_tokenizer(data, run)
    # A run of a version in which there was no other meaning of `target.loss`.
    if isinstance(data, dict) and isinstance(target := data.get("target"), dict):
        target.setdefault("hold", "pressed")
    with contextlib.nullcontext() if changes else errors_of(path):
        return changed_config(data, changes or {}, NamedBy(run, run))


def _check_names_task(data: Any, run: Path, changes: Mapping[str, str]) -> None:
    """UserError for the record of a loop of the user's own, unless the changes name a task."""
    task = data.get("task") if isinstance(data, dict) else None
    named = {"task.name", "task.module"} & changes.keys()
    if not named and isinstance(task, dict) and task.get("name") == OWN_LOOP:
        raise UserError(
            f"{str(run)!r} is the record of a loop of your own, which names no task, so that "
            "nothing is known of its data; use gaugelasso.load_model in Python, or measure it with "
            "gaugelasso eval --set task.module=FILE:NAME"
        )


def _use_own_tokenizer(data: Any, run: Path) -> None:
    """Let a run of a task of tokens read the copy of its tokenizer, wherever it has moved."""
    task = data.get("task") if isinstance(data, dict) else None
    if isinstance(task, dict) and task.get("name") in TOKEN_TASKS and exists(run / TOKENIZER):
        task["tokenizer"] = str(run)


def changed_config(data: Any, changes: Mapping[str, str], by: NamedBy) -> Config:
    for key, text in changes.items() if isinstance(data, dict) else ():
        section, dot, leaf = key.partition(".")
        if not dot:
            raise UserError(f"--set {key}={text}: name the section too, as in train.steps=1000")
        table = data.setdefault(section, {})
        if not isinstance(table, dict):
            raise UserError(f"[{section}] must be a section of key = value lines")
        table[leaf] = _parse(text)
        if section == "target" and leaf in FIGURES:
            for other in FIGURES:  # which it replaces, unless both are given here
                if f"target.{other}" not in changes:
                    table.pop(other, None)
        if leaf == "module":  # named by the user, whatever names the others
            reference = Reference.parse(key, table[leaf], user := NamedBy(Path.cwd()))
            reference.load(user)
            table[leaf] = str(reference)
            table.pop("name", None)  # which it replaces
    return Config.from_dict(data, by)


def _parse(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text  # a bare word is a string
