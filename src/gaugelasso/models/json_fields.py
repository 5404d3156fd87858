"""Checks of JSON data of unknown origin that is to become a dataclass of the structure."""

import functools
import types
import typing
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any, Literal

from gaugelasso.errors import UserError

# A float32 tensor must hold it.
_LARGEST = 3e38


class SpecError(UserError):
    """The structure is invalid, or the model cannot do what was requested."""


@functools.cache
def hints_of(cls: type) -> dict[str, Any]:
    """The types of a class's fields; to read them takes longer than to check a structure."""
    return typing.get_type_hints(cls)


def checked_fields(
    what: str, cls: type, data: Any, optional: Collection[str] = (), skip: str | None = None
) -> dict[str, Any]:
    """A dataclass's fields from JSON data, except `skip`.

    SpecError unless every key is known, every value has its type, and none but `optional` ones are
    missing.
    """
    if not isinstance(data, Mapping):
        raise SpecError(f"a {what} is a JSON object, not {type(data).__name__}")
    hints = hints_of(cls)
    names = [f.name for f in fields(cls)]
    for key in data:
        if key not in names:
            raise SpecError(f"{what}: unknown key {key!r}")
    for name in names:
        if name not in data and name not in optional:
            raise SpecError(f"{what}: key {name!r} is missing")
    values = {}
    for name in names:
        if name != skip and name in data:
            value = tuple(data[name]) if isinstance(data[name], list) else data[name]
            if not _fits(value, hints[name]):
                raise SpecError(f"{what}: {name} = {shown(data[name])} is not {_kind(hints[name])}")
            values[name] = value
    return values


def _fits(value: Any, hint: Any) -> bool:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(part, inner[0]) for part in value)
    if origin is Literal:
        return value in inner
    if origin is types.UnionType:
        return any(_fits(value, choice) for choice in inner)
    if hint is float:
        # An int is accepted if it converts to a finite float32.
        return type(value) in (int, float) and -_LARGEST <= value <= _LARGEST
    return type(value) is hint if hint is not types.NoneType else value is None


def _kind(hint: Any) -> str:
    return str(hint).removeprefix("typing.") if typing.get_origin(hint) else str(hint.__name__)


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
