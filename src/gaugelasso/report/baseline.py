"""What a run is worth against plain training: the tables and sentences of its baseline.json."""

from pathlib import Path
from typing import Any, Literal

from gaugelasso.report import formats
from gaugelasso.report.formats import count, figure, known, ratio
from gaugelasso.report.layout import Table
from gaugelasso.report.run import Run
from gaugelasso.report.schema import (
    FIGURE,
    FINITE,
    NAMES,
    SWITCH,
    TEXT,
    WHOLE,
    WORD,
    WORK,
    Kind,
    Schema,
    check_keys,
)
from gaugelasso.runs.reading import exists, read_json
from gaugelasso.runs.units import final_work

Data = dict[str, Any]
Role = Literal["full", "smallest", "run", "retrained"]

_HEADS: dict[Role, str] = {
    "full": "full model",
    "smallest": "smallest uniform",
    "run": "run",
    "retrained": "run, retrained",
}
_RUN: Schema = {
    "seed": WHOLE, "selection_loss": FIGURE, "loss": FIGURE, "metric": FIGURE, "held": SWITCH,
}  # fmt: skip
_ROW: Schema = {
    "name": TEXT, "kind": TEXT, "fma": WORK, "parameters": FINITE, "training_fma": FINITE,
    "selection_loss": FIGURE, "loss": FIGURE, "metric": FIGURE, "held": SWITCH,
    "latency_ms": FIGURE, "scales": NAMES,
}  # fmt: skip
_TABLES = Kind("a list of tables", lambda value: isinstance(value, list) and bool(value))
_FILE: Schema = {
    "task": TEXT, "metric": TEXT, "accounting": TEXT, "loss": FINITE, "limit": FINITE,
    "steps": WHOLE, "full": TEXT, "smallest_uniform": WORD, "smallest_is_bottom": SWITCH,
    "search_training_fma": FINITE, "latency_device": TEXT, "command": WORD, "commit": WORD,
    "hardware": WORD, "date": TEXT, "rows": _TABLES,
}  # fmt: skip


def load_baseline(path: Path) -> Data:
    """Read a baseline.json. UserError, naming the file and the key, if it is not one."""
    data, source = read_json(path), repr(str(path))
    check_keys(source, data, _FILE)
    for number, row in enumerate(data["rows"], start=1):
        where = f"row {number} of {source}"
        check_keys(where, row, {**_ROW, "runs": _TABLES})
        for run in row["runs"]:
            check_keys(where, run, _RUN)
    names = [row["name"] for row in data["rows"]]
    for name in ("run", "retrained", data["full"], data["smallest_uniform"]):
        if name is not None:
            check_keys(source, dict.fromkeys(names), {name: Kind("", lambda value: True)})
    return data


def baseline_of(run: Run) -> Data | None:
    """The baseline in a run's folder; None if there is none, or if an earlier run had it."""
    path = run.path / "baseline" / "baseline.json"
    if run.summary is None or not exists(path):
        return None
    data = load_baseline(path)
    row, summary = by_name(data)["run"], run.summary
    same = (row["fma"], row["loss"]) == (final_work(summary), summary["loss"])
    return data if same else None


def by_name(data: Data) -> dict[str, Data]:
    return {row["name"]: row for row in data["rows"]}


def compared(data: Data) -> dict[Role, tuple[str, Data]]:
    """Label and row of the models to compare; the full model may be the smallest that reaches."""
    rows, smallest = by_name(data), data["smallest_uniform"]
    models: dict[Role, tuple[str, Data]] = {
        "full": (f"full model ({data['full']})", rows[data["full"]])
    }
    if smallest is not None and smallest != data["full"]:
        models["smallest"] = (f"smallest uniform ({smallest})", rows[smallest])
    models["run"] = ("run", rows["run"])
    models["retrained"] = ("run's structure, retrained", rows["retrained"])
    return models


def sentences(data: Data) -> list[str]:
    """The result: against the smallest uniform model, against the full one, and retrained."""
    rows, loss = by_name(data), figure(data["limit"])
    own, full = rows["run"]["fma"], rows[data["full"]]
    lines = []
    if (name := data["smallest_uniform"]) is None:
        lines.append(
            f"No uniform model up to the full one ({count(full['fma'])} FMA per token) reached the "
            f"loss {loss} in {data['steps']:,} steps; the run's model has {count(own)}."
        )
    else:
        fma = rows[name]["fma"]
        less = f"{ratio(fma / own)} less" if fma >= own else f"{ratio(own / fma)} more"
        lines.append(
            f"The smallest uniform model that reached the loss {loss} in {data['steps']:,} steps "
            f"has {count(fma)} FMA per token ({name}); the run's model has {count(own)}: {less}. "
            f"Against the full model it is {ratio(full['fma'] / own)} less."
        )
    if data["smallest_is_bottom"]:
        lines.append(
            "That is the smallest model of the ladder: a lower loss target would tell models apart."
        )
    again = rows["retrained"]
    lines.append(
        f"The run's structure, retrained from scratch, reached the loss with {_reached(again)}: "
        f"selection loss {known(again['selection_loss'], figure)}."
    )
    if odd := _larger_misses(data):
        lines.append(
            f"Not monotone: {'; '.join(odd)} has more work and missed the loss. Training is noisy; "
            "more seeds would show how much."
        )
    return lines


def _larger_misses(data: Data) -> list[str]:
    """Uniform models that missed the loss although a smaller one reached it."""
    if (name := data["smallest_uniform"]) is None:
        return []
    least = by_name(data)[name]["fma"]
    rows = [row for row in data["rows"] if row["kind"] == "uniform" and row["fma"] > least]
    return [row["name"] for row in rows if not row["held"]]


def _reached(row: Data) -> str:
    runs = row["runs"]
    word = "seed" if len(runs) == 1 else "seeds"
    return f"{sum(run['held'] for run in runs)} of {len(runs)} {word}"


def baseline_table(data: Data) -> Table:
    """The models side by side, one column each; ratios are over the run's figure."""
    own, score = by_name(data)["run"], formats.metric_format(data["metric"])
    models = compared(data)
    lines = [[row["name"] if row["kind"] == "uniform" else "" for _, row in models.values()]]
    for key, form in (
        ("fma", count),
        ("parameters", count),
        ("latency_ms", formats.milliseconds),
        ("training_fma", formats.short),
    ):
        lines.append([_with_ratio(row[key], own[key], form) for _, row in models.values()])
    for key, result in (("selection_loss", figure), ("loss", figure), ("metric", score)):
        lines.append([known(row[key], result) for _, row in models.values()])
    lines.append([_reached(row) for _, row in models.values()])
    names = ["", "FMA per token", "parameters", "latency", "training work",
             "selection loss", "test loss", data["metric"], "reached the loss"]  # fmt: skip
    rows = [[name, *cells] for name, cells in zip(names, lines, strict=True)]
    note = "In brackets: relative to the run. Loss to reach on selection data: "
    note += f"{figure(data['limit'])}. Latency: one sequence, {data['latency_device']}. Training "
    note += "work: FMA per token, all steps of one training; the search took "
    note += f"{formats.short(data['search_training_fma'])} in all. FMA by the accounting "
    note += f"{data['accounting']!r}. {data['hardware'] or 'unknown hardware'}, {data['date']}, "
    note += f"commit {data['commit'] or 'unknown'}. Command: {data['command'] or 'unknown'}"
    return Table("What it is worth", ["", *(_HEADS[role] for role in models)], rows, note)


def trained_table(data: Data) -> Table:
    """Every model that was trained, with the losses of its seeds."""
    rows = [
        [
            row["name"],
            count(row["fma"]),
            ", ".join(known(run["selection_loss"], figure) for run in row["runs"]),
            ", ".join(known(run["loss"], figure) for run in row["runs"]),
            _reached(row),
        ]
        for row in sorted(data["rows"], key=lambda row: row["fma"])
    ]
    headers = ["model", "FMA per token", "selection loss of each seed", "test loss", "reached"]
    return Table("All models that were trained", headers, rows, left=(0, 2, 3))


def _with_ratio(value: float | None, own: float | None, form: formats.Format) -> str:
    text = known(value, form)
    if value is None or not own or value == own:
        return text
    return f"{text} ({ratio(value / own)})"
