"""Builds dataclasses from the tables of a TOML or JSON file.

Checks that every key is a field and that every value has the type of its field. Ranges are
checked by the dataclasses themselves.
"""

import dataclasses
import difflib
import types
import typing
from collections.abc import Collection, Mapping
from typing import Any, Literal

from gaugelasso.errors import UserError

_TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}


def build(section: str, cls: type, values: Any) -> Any:
    """An instance of the dataclass `cls` from one section of a file; UserError names the key."""
    if not isinstance(values, Mapping):
        raise UserError(f"[{section}] must be a section of key = value lines, not {values!r}")
    hints = typing.get_type_hints(cls)
    check_keys_known(section, values, field_names(cls))
    return cls(
        **{key: typed(f"{section}.{key}", value, hints[key]) for key, value in values.items()}
    )


def field_names(cls: type) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


def check_keys_known(section: str, values: Mapping[str, Any], names: Collection[str]) -> None:
    """UserError with the nearest valid name if a key is unknown; section "" is the top level."""
    for key in values:
        if key not in names:
            where = f"{section}.{key}" if section else f"[{key}]"
            near = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"valid: {', '.join(sorted(names))}"
            raise UserError(f"unknown key {where}; {hint}")


def is_config_type(hint: Any) -> bool:
    """Whether a field with this annotation can be a key of a config."""
    return hint in _TYPE_NAMES or typing.get_origin(hint) is Literal


def typed(key: str, value: Any, hint: Any) -> Any:
    """The value if it has the annotated type; a whole number is converted to float."""
    if typing.get_origin(hint) is Literal:
        choices = typing.get_args(hint)
        if value not in choices:
            raise UserError(f"{key} = {value!r}; choose one of: {', '.join(map(str, choices))}")
        return value
    if isinstance(hint, types.UnionType):
        *kinds, last = typing.get_args(hint)
        if len(kinds) != 1 or last is not types.NoneType:
            raise TypeError(f"{key}: a config field must have one type, or one and None")
        return None if value is None else typed(key, value, kinds[0])
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not hint:
        raise UserError(f"{key} = {value!r}: must be {_TYPE_NAMES[hint]}")
    return value
