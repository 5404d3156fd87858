"""Builds results/README.md: every table and figure of the paper, with the paper's figures and ours.

    python benchmarks/tables.py            # as `make tables` does
    python benchmarks/tables.py --check    # only says whether the file is as the JSON files give it

results/paper.json holds the figures of the paper, and for each row the file with ours: which runs
of it (`arm`, `method`, `seed`, `work`, or `only` an outcome), and which figure is their `quality`.
Rows whose file or runs are missing say "not run", so a new results file fills its rows.
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gaugelasso.report.formats import count, figure, milliseconds, ratio, short

ROOT = Path(__file__).parents[1]
PAPER, README = Path("results/paper.json"), Path("results/README.md")
NOT_RUN = "not run"
Runs = Sequence[Mapping[str, Any]]
_LAYER = ("d_ai", "H", "d_k", "d_v", "d_ao", "d_mi", "d_f", "d_mo")


# --- figures of runs -----------------------------------------------------------------------


def outcome_of(run: Mapping[str, Any]) -> str:
    """As in the paper: converged with 99% exact match at less than half of the work."""
    if (compression_of(run) or 1) < 2:
        return "never compressed"
    return "converged" if run["metric"] >= 0.99 else "not converged"


def compression_of(run: Mapping[str, Any]) -> float | None:
    """None if a results file does not say where a run began."""
    if "compression" in run:
        return float(run["compression"])
    return run["fma_initial"] / run["fma_final"] if "fma_initial" in run else None


def _mean(
    key: Callable[[Any], float | None], form: Callable[[float], str]
) -> Callable[[Runs], str]:
    def cell(runs: Runs) -> str:
        values = [value for run in runs if (value := key(run)) is not None]
        if not values or len(values) < len(runs):
            return "—"
        spread = f" ± {form(statistics.stdev(values))}" if len(values) > 1 else ""
        return form(statistics.fmean(values)) + spread

    return cell


def _median(
    key: Callable[[Any], float | None], form: Callable[[float], str], wide: bool = True
) -> Callable[[Runs], str]:
    def cell(runs: Runs) -> str:
        values = [value for run in runs if (value := key(run)) is not None]
        if not values:
            return "—"
        never = f"; {len(runs) - len(values)} never" if len(values) < len(runs) else ""
        middle = form(statistics.median(values))
        if wide and len(values) > 1:
            middle += f" [{form(min(values))}, {form(max(values))}]"
        return middle + never

    return cell


def _range(key: Callable[[Any], float], form: Callable[[float], str]) -> Callable[[Runs], str]:
    def cell(runs: Runs) -> str:
        values = [key(run) for run in runs]
        return "—" if not values else f"{form(min(values))}–{form(max(values))}"

    return cell


def _before(name: str) -> Callable[[Any], float | None]:
    return lambda run: (run.get("before_cooldown") or {}).get(name)


def _score(value: float) -> str:
    return f"{value:.5f}"


def _perplexity(run: Mapping[str, Any]) -> float | None:
    return None if run["loss"] is None else math.exp(run["loss"])


def _in_1e11(value: float) -> str:
    return f"{value / 1e11:.2f}e11"


CELLS: dict[str, Callable[[Runs], str]] = {
    "runs": lambda runs: str(len(runs)),
    "held": lambda runs: str(sum(bool(run.get("held")) for run in runs)),
    "steps": _mean(lambda run: run.get("steps"), count),
    "steps_median": _median(lambda run: run["steps"], count, wide=False),
    "fma": _mean(lambda run: run["fma_final"], short),
    "fma_median": _median(lambda run: run["fma_final"], short),
    "compression": _mean(compression_of, ratio),
    "compression_median": _median(compression_of, ratio, wide=False),
    "compression_median_range": _median(compression_of, ratio),
    "loss": _mean(lambda run: run["loss"], figure),
    "loss_range": _range(lambda run: run["loss"], lambda value: f"{value:.2g}"),
    "metric": _mean(lambda run: run["metric"], _score),
    "metric_median": _median(lambda run: run["metric"], _score, wide=False),
    "perplexity": _mean(_perplexity, "{:.3f}".format),
    "parameters": _mean(lambda run: run.get("parameters_final"), short),
    "reached": _median(lambda run: run["target_reached_step"], count),
    "training_median": _median(lambda run: run["training_fma"], _in_1e11, wide=False),
    "before_loss": _mean(_before("loss"), figure),
    "before_metric": _mean(_before("metric"), _score),
    "before_fma": _mean(_before("fma"), short),
    "step_ms": _mean(lambda run: run["ms"], milliseconds),
}  # fmt: skip


# --- sources -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """The runs of a row, and all runs of the condition that they are a class of."""

    runs: Runs
    whole: Runs
    quality: str

    def cell(self, kind: str) -> str:
        """`kind` names a figure; `kind@seed` that of one seed."""
        name, _, seed = kind.partition("@")
        if name == "share":
            return f"{len(self.runs)}/{len(self.whole)}"
        if name == "converged":
            converged = sum(outcome_of(run) == "converged" for run in self.whole)
            return f"{converged}/{len(self.whole)}"
        runs = [run for run in self.runs if not seed or run["seed"] == int(seed)]
        if seed and not runs:
            return NOT_RUN
        unit = " ppl" if name == "quality" and self.quality == "perplexity" else ""
        return CELLS[self.quality if name == "quality" else name](runs) + unit


class Sources:
    """Results files, read once. `used` are those that some row comes from."""

    def __init__(self, root: Path):
        self._root, self._read = root, dict[str, dict[str, Any]]()
        self.used: dict[str, dict[str, Any]] = {}

    def find(self, ours: Mapping[str, Any] | None) -> Found | None:
        """The runs of a row; None if its file does not exist or has none of them.

        A class of outcomes that no run has is not missing: it is empty.
        """
        if ours is None or (data := self._load(ours["file"])) is None:
            return None
        if not (whole := self._chosen(data, ours)):
            return None
        self.used[ours["file"]] = data
        only = ours.get("only")
        runs = [run for run in whole if only is None or outcome_of(run) == only]
        return Found(runs, whole, ours.get("quality", "metric"))

    def _load(self, name: str) -> dict[str, Any] | None:
        path = self._root / name
        if name not in self._read and path.exists():
            self._read[name] = json.loads(path.read_text(encoding="utf-8"))
        return self._read.get(name)

    @staticmethod
    def _chosen(data: Mapping[str, Any], ours: Mapping[str, Any]) -> list[dict[str, Any]]:
        if "work" in ours:
            return [row for row in data["rows"] if row["work"] == ours["work"]]
        arms = {arm["name"]: arm["runs"] for arm in data.get("arms", [])}
        runs = arms.get(ours.get("arm"), data.get("runs", []))
        for key in ("method", "seed"):
            if key in ours:
                runs = [run for run in runs if run.get(key) == ours[key]]
        return list(runs)


# --- the page ------------------------------------------------------------------------------


def build(root: Path = ROOT) -> str:
    """The text of results/README.md."""
    paper, sources = json.loads((root / PAPER).read_text(encoding="utf-8")), Sources(root)
    parts = [
        "# Every table and figure of the paper",
        "",
        f"{paper['paper']}.",
        "",
        "Built by `make tables` from [paper.json](paper.json), which holds the paper's figures, "
        "and from the results files; do not edit it. A test compares both. "
        f'"{NOT_RUN}": no run of ours has this row. Figures are mean ± standard deviation over '
        "seeds unless a table says otherwise. Conditions, and what may be compared, are in "
        "[Results](../docs/development/results.md).",
        "",
    ]
    for table in paper["tables"]:
        parts += _table(table, sources)
    for table in paper["layers"]:
        parts += _layers(table, sources)
    parts += _figures(paper["figures"], sources, root)
    parts += _definitions(paper["definitions"], root)
    return "\n".join([*parts, *_commands(paper, sources)]) + "\n"


def _table(table: Mapping[str, Any], sources: Sources) -> list[str]:
    names = [name for name, _ in table["columns"]]
    lines = _heading(table) + _head(["", "", *names, "ours from"])
    for row in table["rows"]:
        found = sources.find(row.get("ours"))
        ours = [NOT_RUN, *("" for _ in names[1:])]
        if found is not None:
            ours = [found.cell(kind) for _, kind in table["columns"]]
        origin = [] if found is None else [_links(row["ours"])]
        origin += [row["note"]] if "note" in row else []
        name = row["name"]
        if set(row["paper"]) != {"—"}:
            lines.append(_line([name, "paper", *row["paper"], ""]))
            name = ""
        lines.append(_line([name, "**ours**", *ours, "; ".join(origin)]))
    return [*lines, ""]


def _layers(table: Mapping[str, Any], sources: Sources) -> list[str]:
    found = sources.find(table.get("ours"))
    ours = None if found is None else layer_rows(found.runs[0]["structure"])
    lines = _heading(table) + _head(["layer", "", *_LAYER])
    for depth, cells in enumerate(table["paper"]):
        lines.append(_line([str(depth), "paper", *cells]))
        if ours is not None:
            lines.append(_line(["", "**ours**", *ours[depth]]))
    end = f"Ours: {NOT_RUN if found is None else _links(table['ours'])}."
    return [*lines, "", f"{end} —: the operator is removed. One channel of d_k is a RoPE pair.", ""]


def layer_rows(structure: Mapping[str, Any]) -> list[list[str]]:
    """The widths of each layer of a transformer, in the order of the paper's columns."""
    rows = [["—"] * len(_LAYER) for _ in range(structure["layers"])]
    for operator in structure["operators"]:
        row, reads, writes = rows[operator["depth"]], operator["reads"], operator["writes"]
        if operator["kind"] == "attention":
            keys, values = _number(operator["keys"]), _number(operator["values"])
            row[:5] = [_number(reads), str(operator["heads"]), keys, values, _number(writes)]
        else:
            row[5:] = [_number(reads), _number(operator["filters"]), _number(writes)]
    return rows


def _number(indices: Any) -> str:
    """A structure lists the sites of an interface, and gives the number of other channels."""
    return str(len(indices) if isinstance(indices, list) else indices)


def _figures(figures: Sequence[Mapping[str, Any]], sources: Sources, root: Path) -> list[str]:
    lines = ["## Figures", "", *_head(["figure", "shows", "paper", "ours", "picture", "ours from"])]
    for row in figures:
        found, picture = sources.find(row.get("ours")), row.get("picture")
        ours, links = NOT_RUN, ""
        if found is not None:
            ours = f"{found.cell('fma')} FMA, {found.cell('compression')}, {found.cell('quality')}"
            links = _links(row["ours"])
        shown = f"[picture](../{picture})" if picture and (root / picture).exists() else ""
        lines.append(_line([f"`{row['label']}`", row["shows"], row["paper"], ours, shown, links]))
    note = "The picture of any run: `gaugelasso report RUN` (`profile.png`, `training.png`)."
    return [*lines, "", note, ""]


def _definitions(rows: Sequence[Mapping[str, Any]], root: Path) -> list[str]:
    lines = ["## Tables without measurements", "", *_head(["table", "shows", "here"])]
    for row in rows:
        where, here = row["where"], "not here"
        if where is not None and (root / where).exists():
            here = f"[{Path(where).name}]({_relative(where)})"
        lines.append(_line([f"`{row['label']}`", row["shows"], here]))
    return [*lines, ""]


def _commands(paper: Mapping[str, Any], sources: Sources) -> list[str]:
    lines = [
        "## Commands",
        "",
        "Configs have moved since: see [Results](../docs/development/results.md).",
    ]
    rows = [row for table in paper["tables"] for row in table["rows"]]
    for name, data in sorted(sources.used.items()):
        ours = [row["ours"] for row in rows if row.get("ours", {}).get("file") == name]
        commands = [data["command"]] if data.get("command") else []
        commands += [each["command"] for each in ours if "command" in each]
        lines += ["", f'<a id="{_anchor(name)}"></a>', f"### {name}", ""]
        lines += ["```sh", *dict.fromkeys(commands), "```", ""]
        lines.append(
            f"Commit {data.get('commit') or 'unknown'}, {data['hardware']}, {data['date']}."
        )
    return lines


def _heading(table: Mapping[str, Any]) -> list[str]:
    note = [table["note"], ""] if "note" in table else []
    return [f"## `{table['label']}`: {table['title']}", "", *note]


def _head(names: Sequence[str]) -> list[str]:
    return [_line(names), "|" + "---|" * len(names)]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def _links(ours: Mapping[str, Any]) -> str:
    name = ours["file"]
    which = "".join(f", {ours[key]}" for key in ("arm", "method", "work") if key in ours)
    return f"[{Path(name).name}]({_relative(name)}){which}; [command](#{_anchor(name)})"


def _relative(name: str) -> str:
    """A path of the repository as seen from results/."""
    return name.removeprefix("results/") if name.startswith("results/") else f"../{name}"


def _anchor(name: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in name.removesuffix(".json"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="compare only; exit with 1 if it differs"
    )
    arguments = parser.parse_args()
    text = build()
    if not arguments.check:
        (ROOT / README).write_text(text, encoding="utf-8")
    elif (ROOT / README).read_text(encoding="utf-8") != text:
        sys.exit(f"{README} differs from what the JSON files give: run `make tables`")


if __name__ == "__main__":
    main()
