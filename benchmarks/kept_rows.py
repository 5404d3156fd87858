"""Results files that grow: a call replaces its own rows and keeps those of other calls."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gaugelasso.runs.environment import environment
from gaugelasso.runs.writing import make_folder, write_json

JOINT = "; "  # between the commands of a results file


def write_beside(path: Path, rows: Sequence[dict[str, Any]], keys: Sequence[str]) -> None:
    """Write rows beside those that differ from all of them in `keys`; commands and note stay."""
    about = environment("cpu")
    old = json.loads(path.read_text()) if path.exists() else {"rows": []}
    new = [[row[key] for key in keys] for row in rows]
    kept = [row for row in old["rows"] if [row[key] for key in keys] not in new]
    commands = [*filter(None, old.get("command", "").split(JOINT)), about["command"]]
    about["command"] = JOINT.join(dict.fromkeys(commands))
    make_folder(path.parent)
    note = {"note": old["note"]} if "note" in old else {}
    write_json(path, {**about, **note, "rows": [*kept, *rows]})
