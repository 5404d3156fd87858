"""Files of measured rows: where they are, and how a row is written to one."""

import re
from pathlib import Path
from typing import Any

from gaugelasso.errors import UserError
from gaugelasso.runs.environment import environment
from gaugelasso.runs.reading import exists, read_json
from gaugelasso.runs.writing import make_folder, write_json

Row = dict[str, Any]


def default_file(device: str) -> Path:
    """Return benchmarks/<hardware>_<date>.json, in characters that every file system allows."""
    found = environment(device)
    name = re.sub(r"[^A-Za-z0-9]+", "-", found["hardware"]).strip("-").lower()
    return Path("benchmarks") / f"{name}_{found['date'][:10]}.json"


def record(path: Path, device: str, kind: str, row: Row) -> None:
    """Write a row to a benchmark file, in place of an older row with the same name (`work`)."""
    kept = read(path, kind)
    rows = [old for old in kept.get(kind, []) if old["work"] != row["work"]]
    new = {**row, "at": _circumstances(row.get("device", device))}
    make_folder(path.parent)
    write_json(path, {**kept, **_circumstances(device), kind: [*rows, new]})


def read(path: Path, kind: str) -> dict[str, Any]:
    """The content of a benchmark file, empty if there is none; UserError if it is another file."""
    kept = read_json(path) if exists(path) else {}
    rows = kept.get(kind, []) if isinstance(kept, dict) else None
    if not isinstance(rows, list) or not all(isinstance(e, dict) and "work" in e for e in rows):
        raise UserError(
            f"{str(path)!r} is no benchmark file: it has no list {kind!r} of rows with a name "
            "('work'); remove it, or choose another"
        )
    return dict(kept)


def _circumstances(device: str) -> Row:
    found = environment(device)
    versions = {key: found[key] for key in ("gaugelasso", "torch", "python")}
    return {key: found[key] for key in ("commit", "hardware", "date")} | {"versions": versions}
