"""Results files that grow: a call replaces its own rows and keeps those of other calls."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gaugelasso.runs.environment import environment
from gaugelasso.runs.writing import make_folder, write_json

JOINT = "; "  # between the commands of a results file


def commands_in(data: Mapping[str, Any]) -> list[str]:
    """The commands of a results file. One may have a quoted `;` of its own."""
    joined = data.get("command") or ""
    return [each for each in re.split(r"; (?=gaugelasso |python )", joined) if each]


def with_command(old: Mapping[str, Any], new: str) -> str:
    """The commands of a results file and another one, each once."""
    return JOINT.join(dict.fromkeys([*commands_in(old), new]))


def header(old: Mapping[str, Any], device: str) -> dict[str, Any]:
    """Where new rows come from, with the commands and the note that a file has already."""
    about = environment(device)
    about["command"] = with_command(old, about["command"])
    return about | ({"note": old["note"]} if "note" in old else {})


def write_beside(path: Path, rows: Sequence[dict[str, Any]], keys: Sequence[str]) -> None:
    """Write rows beside those that differ from all of them in `keys`; commands and note stay."""
    old = json.loads(path.read_text()) if path.exists() else {"rows": []}
    new = [[row[key] for key in keys] for row in rows]
    kept = [row for row in old["rows"] if [row[key] for key in keys] not in new]
    make_folder(path.parent)
    write_json(path, header(old, "cpu") | {"rows": [*kept, *rows]})
