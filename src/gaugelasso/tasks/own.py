"""The task that a [task] section names: built in, installed with a package, or in a module."""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

from gaugelasso.errors import UserError, first_line
from gaugelasso.files.typed import build, check_keys_known, field_names, is_config_type
from gaugelasso.plugins import NamedBy, Reference, find_entry_point, installed_names
from gaugelasso.tasks import TASKS
from gaugelasso.tasks.protocol import SequenceTask, Task, members

GROUP = "gaugelasso.tasks"


@dataclasses.dataclass(frozen=True)
class FoundTask:
    """A task with the name that titles show; `module` is set if the config names a module."""

    task: Task
    name: str
    module: str = ""


def find_task(section: Any, by: NamedBy) -> FoundTask:
    """Build the task of a [task] section; UserError names the key that is wrong."""
    if not isinstance(section, Mapping):
        raise UserError(f"[task] must be a section of key = value lines, not {section!r}")
    if {"module", "name"} <= section.keys():
        raise UserError("task.name and task.module exclude each other; give only one of them")
    fields = {key: value for key, value in section.items() if key not in ("name", "module")}
    if "module" in section:
        reference = Reference.parse("task.module", section["module"], by)
        cls = reference.load(by)
        _check_class(f"task.module = {str(reference)!r}", cls)
        return FoundTask(_build("module", cls, fields), cls.__name__, str(reference))
    name = section.get("name")
    if isinstance(name, str) and name in TASKS:
        check_keys_known("task", section, ["name", *field_names(TASKS[name])])
        return FoundTask(build("task", TASKS[name], fields), name)
    known = ", ".join([*TASKS, *installed_names(GROUP)])
    if name is None:
        raise UserError(
            f"task.name is missing; set it in [task] to one of: {known}; or set task.module"
        )
    if not isinstance(name, str):
        raise UserError(f"task.name = {name!r} is unknown; choose one of: {known}")
    cls = find_entry_point("task.name", GROUP, name)
    if cls is None:
        raise UserError(
            f"task.name = {name!r} is unknown; choose one of: {known}; or set task.module"
        )
    _check_class(f"task.name = {name!r}", cls)
    return FoundTask(_build("name", cls, fields), name)


def sequences(task: Task) -> SequenceTask:
    """The task, if it has what the built-in transformer needs to know of it; else UserError."""
    if isinstance(task, SequenceTask):
        return task
    missing = [name for name in members(SequenceTask) if not hasattr(task, name)]
    raise UserError(
        f"[task]: {type(task).__name__} has no {', '.join(missing)}, which the built-in "
        "transformer needs; add them to the class, or set model.module"
    )


def _check_class(title: str, cls: Any) -> None:
    """UserError unless this is a dataclass with the members of a task and plain fields."""
    if not isinstance(cls, type) or not dataclasses.is_dataclass(cls):
        raise UserError(
            f"{title} is {cls!r}; it must be a frozen dataclass (docs/how-to/own-task.md)"
        )
    fields = {field.name: field for field in dataclasses.fields(cls)}
    missing = [name for name in members(Task) if name not in fields and not hasattr(cls, name)]
    if missing:
        raise UserError(
            f"{title} has no {', '.join(missing)}; a task needs them (docs/how-to/own-task.md)"
        )
    try:
        hints = typing.get_type_hints(cls)
    except NameError as error:
        raise UserError(f"{title}: its annotations cannot be read ({first_line(error)})") from None
    for name, field in fields.items():
        if name in ("name", "module") or not field.init:
            raise UserError(
                f"{title}: field {name!r} cannot be a key of [task]; rename it, or make it a "
                "property"
            )
        if not is_config_type(hints[name]):
            raise UserError(
                f"{title}: field {name!r} must be an int, float, bool, str or Literal, not "
                f"{hints[name]}"
            )


def _build(key: str, cls: type, values: Mapping[str, Any]) -> Task:
    check_keys_known("task", values, [key, *field_names(cls)])
    for field in dataclasses.fields(cls):
        required = field.default is field.default_factory is dataclasses.MISSING
        if required and field.name not in values:
            raise UserError(f"task.{field.name} is missing; {cls.__name__!r} needs it")
    try:
        return build("task", cls, values)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"[task]: {cls.__name__} raised {type(error).__name__}: {first_line(error)}"
        ) from error
