"""Writes config sections as TOML; tomllib reads them."""

import json
import re
from collections.abc import Mapping
from typing import Any

from gaugelasso.errors import UserError

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
Sections = Mapping[str, Mapping[str, Any]]


def to_toml(sections: Sections, remarks: Mapping[str, str] | None = None) -> str:
    """Writes flat sections; keys with None are left out.

    `remarks`, "section.key" -> text, become comments above their keys.
    """
    remarks = remarks or {}
    parts = []
    for name, values in sections.items():
        lines = [f"[{_key(name)}]"]
        for key, value in values.items():
            if value is None:
                continue  # a key that is not given
            where = f"{name}.{key}"
            lines += [comment(remarks[where])] if where in remarks else []
            lines.append(f"{_key(key)} = {_value(where, value)}")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def comment(text: str) -> str:
    # A line break in a name from a run would end the comment.
    return "# " + "".join(c if c.isprintable() else "?" for c in text)


def _key(name: str) -> str:
    return name if _BARE_KEY.fullmatch(name) else _string(name)


def _value(where: str, value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case str():
            return _string(value)
        case list() | tuple():
            return f"[{', '.join(_value(where, part) for part in value)}]"
    raise UserError(f"{where} = {value!r} cannot be written as TOML")


def _string(text: str) -> str:
    # TOML shares JSON's escapes, but also requires one for the control character DEL.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
