"""The runs of a row of results/README.md: results files, read and checked once.

Which runs of a file a row has stands in results/paper.json; `benchmarks.tables` describes its keys.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.table_cells import CELLS, Runs, converged_share, outcome_of

from gaugelasso.errors import UserError
from gaugelasso.report.results_schema import check_results
from gaugelasso.report.schema import FINITE, NAMED, TEXT, WORD, Kind, check_keys

PAPER = Path("results/paper.json")
NOT_RUN = "not run"
_TIMES = Kind(
    "a list of figures, each finite or null",
    lambda value: isinstance(value, list) and all(map(NAMED.fits, value)),
)


@dataclass(frozen=True)
class Found:
    """The runs of a row, and all runs of the condition that they are a class of.

    `further` are the seeds that come from the file of more seeds.
    """

    runs: Runs
    whole: Runs
    quality: str
    further: Sequence[int] = ()

    def cell(self, kind: str) -> str:
        """`kind` names a figure; `kind@seed` that of one seed."""
        name, _, seed = kind.partition("@")
        if name == "share":
            return f"{len(self.runs)}/{len(self.whole)}"
        if name == "converged":
            return converged_share(self.whole)
        runs = [run for run in self.runs if not seed or run["seed"] == int(seed)]
        if seed and not runs:
            return NOT_RUN
        unit = " ppl" if name == "quality" and self.quality == "perplexity" else ""
        return CELLS[self.quality if name == "quality" else name](runs) + unit


class Sources:
    """Results files, read and checked once.

    `used` are those that some row comes from, `missing` has what rows look for and do not find.
    """

    def __init__(self, root: Path):
        self._root, self._read = root, dict[str, dict[str, Any] | None]()
        self.used: dict[str, dict[str, Any]] = {}
        self.missing: dict[str, list[Mapping[str, Any]]] = {}

    def find(self, ours: Mapping[str, Any]) -> Found | None:
        """The runs of a row; None if its file does not exist or has none of them.

        A class of outcomes that no run has is not missing: it is empty.
        """
        whole = self._runs(ours)
        known = {run.get("seed") for run in whole}
        more = ours.get("more")
        further = [run for run in self._runs(more) if run["seed"] not in known] if more else []
        if not whole and not further:
            self.missing.setdefault(ours["file"], []).append(ours)
            return None
        both, only = [*whole, *further], ours.get("only")
        runs = [run for run in both if only is None or outcome_of(run) == only]
        seeds = sorted(run["seed"] for run in further)
        return Found(runs, both, ours.get("quality", "metric"), seeds)

    def curve(self, ours: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The curve of a task; None if its file does not exist or has none of it."""
        name = ours["file"]
        data = self.load(name)
        curves = (each for each in (data or {}).get("curves", []) if each["task"] == ours["task"])
        if data is None or (found := next(curves, None)) is None:
            self.missing.setdefault(name, []).append(ours)
            return None
        self.used[name] = data
        return dict(found)

    def load(self, name: str) -> dict[str, Any] | None:
        """The content of a file; None if there is no such file."""
        if name not in self._read:
            path = self._root / name
            check = check_curves if name.endswith("wallclock.json") else check_results
            self._read[name] = check(Path(name), read(path)) if path.exists() else None
        return self._read[name]

    def _runs(self, ours: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        data = self.load(ours["file"])
        runs = [] if data is None else _chosen(data, ours)
        if data is not None and runs:
            self.used[ours["file"]] = data
        return runs


def read(path: Path) -> Any:
    """The content of a JSON file; UserError if it is not one."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{str(path)!r}: not a readable JSON file ({error})") from None


def _chosen(data: Mapping[str, Any], ours: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if "work" in ours:
        return [row for row in data.get("rows", []) if row["work"] == ours["work"]]
    runs = data.get("runs", [])
    if "arm" in ours:
        arms = {arm["name"]: arm["runs"] for arm in data.get("arms", [])}
        runs = arms.get(ours["arm"], [])
    if "method" in ours:
        name = _method(data, ours)
        runs = [run for run in runs if name is not None and run.get("method") == name]
    return [run for run in runs if "seed" not in ours or run["seed"] == ours["seed"]]


def _method(data: Mapping[str, Any], ours: Mapping[str, Any]) -> str | None:
    """The one method of a file that a row names; None if the file has no run of it.

    UserError if it has several, as then the row must say which: their mean is of no method.
    """
    # A file that lists no methods has one condition of each.
    plain = [{"method": name} for name in dict.fromkeys(r.get("method") for r in data["runs"])]
    listed: list[Mapping[str, Any]] = data.get("methods") or plain
    named = [one for one in listed if ours["method"] in (one["method"], one.get("family"))]
    where = ours.get("where", {})
    for key in where:
        if named and not any(key in one.get("conditions", {}) for one in named):
            raise UserError(f"{ours['file']}: {ours['method']!r} has no condition {key!r}")
    fit = [
        one["method"]
        for one in named
        if all(one["conditions"].get(key, None) == value for key, value in where.items())
    ]
    if len(fit) > 1:
        raise UserError(
            f"{ours['file']} has {len(fit)} methods that are {ours['method']!r}: "
            f'{", ".join(map(repr, fit))}; in {PAPER}, add "where" with a condition of one'
        )
    return fit[0] if fit else None


def check_curves(path: Path, data: Any) -> dict[str, Any]:
    """The content of a file of curves; UserError, naming file and key, if it is not one."""
    source = repr(str(path))
    check_keys(source, data, {"hardware": WORD, "date": WORD, "commit": WORD, "command": WORD})
    if not isinstance(curves := data.get("curves"), list):
        raise UserError(f"{source}: key 'curves' is missing")
    kinds = {"task": TEXT, "step_ms": _TIMES, "fma_initial": FINITE, "fma_final": FINITE}
    for number, each in enumerate(curves):
        check_keys(f"curves[{number}] of {source}", each, kinds)
    return dict(data)
