"""Builds results/README.md: every table and figure of the paper, with the paper's figures and ours.

    python -m benchmarks.tables            # as `make tables` does
    python -m benchmarks.tables --check    # only says whether the file is as the JSON files give it

results/paper.json holds the figures of the paper, and for each row the file with ours: which runs
of it (`arm`, `method` and `where` for its conditions, `seed`, `work`, `task` of a curve, or `only`
an outcome), a file with `more` seeds of the same, how many `seeds` the paper has, and which figure
is their `quality`. Rows whose file or runs are missing say "not run", so a new results file fills
its rows. `planned` has the runs that are to be made; `benchmarks.planned` gives their commands.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.kept_rows import commands_in
from benchmarks.planned import commands_of, seeds_text
from benchmarks.small_tables import rivals_section
from benchmarks.table_cells import CELLS, Runs, missed_share, speed
from benchmarks.table_sources import NOT_RUN, PAPER, Found, Sources, read

from gaugelasso.errors import UserError

ROOT = Path(__file__).parents[1]
README = Path("results/README.md")
_LAYER = ("d_ai", "H", "d_k", "d_v", "d_ao", "d_mi", "d_f", "d_mo")
# The keys of "ours" in paper.json.
_OURS = {
    "file", "arm", "method", "where", "seed", "seeds", "work", "only", "quality", "command", "more",
    "task",
}  # fmt: skip


def rows_of(paper: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every row that has figures of ours, by what it is called."""
    for table in paper["tables"]:
        yield from ((f"{table['label']}, {row['name']}", row) for row in table["rows"])
    yield from ((each["label"], each) for each in (*paper["layers"], *paper["figures"]))


def _check(paper: Mapping[str, Any]) -> None:
    """UserError, naming the row, if its "ours" names no file, or something unknown."""
    for name, row in rows_of(paper):
        ours = row.get("ours", {})
        if "file" not in ours:
            raise UserError(f'{PAPER}: {name!r} has no "file" in "ours"')
        if unknown := ours.keys() - _OURS:
            raise UserError(f"{PAPER}: {name!r} has {min(unknown)!r}; known are {sorted(_OURS)}")
        if unknown := ours.get("more", {}).keys() - {"file", "method", "note"}:
            raise UserError(f'{PAPER}: {name!r} has {min(unknown)!r} in "more"')
        if ours.get("quality", "metric") not in CELLS:
            raise UserError(f"{PAPER}: {name!r} has the quality {ours['quality']!r}, no figure")


# --- the page ------------------------------------------------------------------------------


def build(root: Path = ROOT) -> str:
    """The text of results/README.md."""
    paper, sources = read(root / PAPER), Sources(root)
    _check(paper)
    parts = [
        "# Every table and figure of the paper",
        "",
        f"{paper['paper']}.",
        "",
        "Built by `make tables` from [paper.json](paper.json), which holds the paper's figures, "
        "and from the results files; do not edit it. A test compares both. "
        f'"{NOT_RUN}": no run of ours has this row yet; [Not run yet](#not-run-yet) has the '
        "commands. Figures are mean ± standard deviation over seeds unless a table says otherwise. "
        "Conditions, and what may be compared, are in [Results](../docs/development/results.md).",
        "",
    ]
    for table in paper["tables"]:
        parts += _table(table, sources)
    for table in paper["layers"]:
        parts += _layers(table, sources)
    parts += _figures(paper["figures"], sources, root)
    parts += rivals_section(root)
    parts += _definitions(paper["definitions"], root)
    return "\n".join([*parts, *_planned(paper, sources), *_commands(paper, sources)]) + "\n"


def _table(table: Mapping[str, Any], sources: Sources) -> list[str]:
    names = [name for name, _ in table["columns"]]
    lines = _heading(table) + _head(["", "", *names, "ours from"])
    for row in table["rows"]:
        found = sources.find(row["ours"])
        ours, origin = [NOT_RUN, *("" for _ in names[1:])], [_expected(row["ours"])]
        if found is not None:
            ours = [found.cell(kind) for _, kind in table["columns"]]
            notes = [missed_share(found.runs), _lacking(found.whole, row["ours"])]
            links = _further(found, row["ours"])
            origin = [links, *filter(None, notes)]
        origin += [row["note"]] if "note" in row else []
        name = row["name"]
        if set(row["paper"]) != {"—"}:
            lines.append(_line([name, "paper", *row["paper"], ""]))
            name = ""
        lines.append(_line([name, "**ours**", *ours, "; ".join(origin)]))
    return [*lines, ""]


def _layers(table: Mapping[str, Any], sources: Sources) -> list[str]:
    found = sources.find(table["ours"])
    ours = None if found is None else layer_rows(found.runs[0]["structure"])
    lines = _heading(table) + _head(["layer", "", *_LAYER])
    for depth, cells in enumerate(table["paper"]):
        lines.append(_line([str(depth), "paper", *cells]))
        if ours is not None:
            lines.append(_line(["", "**ours**", *ours[depth]]))
    missing = f"{NOT_RUN}, {_expected(table['ours'])}"
    end = f"Ours: {missing if found is None else _links(table['ours'])}."
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
        picture, curved = row.get("picture"), "task" in row["ours"]
        ours, links = NOT_RUN, _expected(row["ours"])
        if curved and (curve := sources.curve(row["ours"])) is not None:
            ours, links = speed(curve), _links(row["ours"])
        elif not curved and (found := sources.find(row["ours"])) is not None:
            ours = f"{found.cell('fma')} FMA, {found.cell('compression')}, {found.cell('quality')}"
            links = _links(row["ours"])
        shown = f"[picture](../{picture})" if picture and (root / picture).exists() else ""
        if ours == NOT_RUN and (other := row.get("meanwhile")):
            shown = f"[of another run](../{other['picture']}): {other['note']}"
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


def _planned(paper: Mapping[str, Any], sources: Sources) -> list[str]:
    """The files that rows wait for, with the commands that write them."""
    planned = paper["planned"]
    commands = {
        name: commands_of(each, sources.load(name), name in sources.missing)
        for name, each in planned.items()
    }
    wanted = [name for name in commands if name in sources.missing or commands[name]]
    wanted += sorted(sources.missing.keys() - commands)
    note = paper["planned_note"] if wanted else "Every row has runs."
    lines = ['<a id="not-run-yet"></a>', "## Not run yet", "", note]
    for name in wanted:
        missing = sources.missing.get(name, [])
        rows = {f"`{row}`": None for row, each in rows_of(paper) if each["ours"] in missing}
        text = f"For {', '.join(rows)}." if rows else "For further seeds."
        lines += ["", f"### Missing: {name}", "", text]
        if lines_of := commands.get(name):
            lines += ["", "```sh", *lines_of, "```"]
    return [*lines, ""]


def _commands(paper: Mapping[str, Any], sources: Sources) -> list[str]:
    lines = [
        "## Commands",
        "",
        "Configs have moved since: see [Results](../docs/development/results.md).",
    ]
    for name, data in sorted(sources.used.items()):
        ours = [row["ours"] for _, row in rows_of(paper) if row["ours"]["file"] == name]
        commands = [*commands_in(data), data.get("compare_command") or ""]
        commands += [each["command"] for each in ours if "command" in each]
        lines += ["", f'<a id="{_anchor(name)}"></a>', f"### {name}", ""]
        lines += ["```sh", *dict.fromkeys(filter(None, commands)), "```", ""]
        origin = f"Commit {data.get('commit') or 'unknown'}, {data['hardware']}, {data['date']}."
        lines.append(" ".join([origin, *filter(None, [data.get("note")])]))
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
    return f"[{Path(name).name}]({_relative(name)}){_which(ours)}; [command](#{_anchor(name)})"


def _further(found: Found, ours: Mapping[str, Any]) -> str:
    """Links to the file of a row, and to that of more seeds."""
    if not found.further:
        return _links(ours)
    first = [] if len(found.further) == len(found.whole) else [_links(ours)]
    more = ours["more"]
    note = f" ({more['note']})" if "note" in more else ""
    plural = "s" if len(found.further) > 1 else ""
    return "; ".join(
        [*first, f"seed{plural} {seeds_text(found.further)} from {_links(more)}{note}"]
    )


def _which(ours: Mapping[str, Any]) -> str:
    """Which of the runs of a file a row has."""
    where = [f"{key} = {value}" for key, value in ours.get("where", {}).items()]
    named = [ours[key] for key in ("arm", "method", "work") if key in ours]
    return "".join(f", {each}" for each in [*named, *where])


def _expected(ours: Mapping[str, Any]) -> str:
    """Where the figures of a row are going to be."""
    return f"expected in `{ours['file']}`" + _which(ours)


def _lacking(runs: Runs, ours: Mapping[str, Any]) -> str:
    """How many of the paper's seeds were not run; empty if none."""
    number = ours.get("seeds", 0)
    return f"{number - len(runs)} of {number} seeds not run" if len(runs) < number else ""


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
    try:
        text = build()
    except UserError as error:
        parser.exit(2, f"error: {error}\n")
    if not arguments.check:
        (ROOT / README).write_text(text, encoding="utf-8")
    elif (ROOT / README).read_text(encoding="utf-8") != text:
        sys.exit(f"{README} differs from what the JSON files give: run `make tables`")


if __name__ == "__main__":
    main()
