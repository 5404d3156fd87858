"""Results files: the outcome of all seeds of one condition, or of several arms, as small JSON."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gaugelasso.report import formats
from gaugelasso.report.costs import work_format
from gaugelasso.report.data import Condition, check_finished, load_condition
from gaugelasso.report.goal import names_target
from gaugelasso.report.layout import Table, to_markdown
from gaugelasso.report.run import Run
from gaugelasso.runs.units import noun


def collect_results(folders: Sequence[Path]) -> dict[str, Any]:
    """The results of finished runs of one condition, sorted by seed.

    UserError if a run is not finished, or if the runs differ in more than their seed (task,
    model, target, accounting, ...). Commands, commits and hardware that differ are joined by
    "; ". Dates become "first/last".
    """
    runs = load_condition(folders)
    check_finished(runs)
    return {**origin_of(runs), "runs": [run_result(run) for run in runs]}


def collect_arms(arms: Sequence[Condition]) -> dict[str, Any]:
    """The results of several conditions in one file, in the order given."""
    return {
        **origin_of([run for arm in arms for run in arm.runs]),
        "arms": [
            {
                "name": arm.name,
                "changes": list(arm.changes),
                "runs": [run_result(run) for run in arm.runs],
            }
            for arm in arms
        ],
    }


def results_table(results: dict[str, Any], title: str) -> str:
    """A results file as a Markdown table: every seed, then mean ± standard deviation."""
    runs, columns = results["runs"], _columns(results["accounting"], results.get("metric_name"))
    cells = [
        [formats.known(run.get(key), form) for run in runs]
        + ([formats.over_seeds([run.get(key) for run in runs], form)] if len(runs) > 1 else [])
        for key, _, form in columns
    ]
    names = [str(run["seed"]) for run in runs] + (["mean ± std"] if len(runs) > 1 else [])
    rows = [[name, *row] for name, row in zip(names, zip(*cells, strict=True), strict=True)]
    return to_markdown(
        Table(title, ["seed", *(name for _, name, _ in columns)], rows, origin(results))
    )


def origin(results: dict[str, Any]) -> str:
    """Accounting, hardware, date, commit and command of a results file, for a table's note."""
    note = f"Accounting: {results['accounting']}. {results['hardware']}, {results['date']}, "
    return note + f"commit {results['commit'] or 'unknown'}. Command: {results['command']}"


def _columns(accounting: str, metric: str | None) -> tuple[tuple[str, str, formats.Format], ...]:
    cost, form = noun(accounting), work_format(accounting)
    # Early files do not hold the metric's name; five digits are enough for 99.996%.
    score = formats.metric_format(metric, digits=3) if metric else "{:.5g}".format
    return (
        ("steps", "steps", formats.count),
        ("target_reached_step", "first batch within target", formats.count),
        ("fma_initial", f"{cost} before", form),
        ("fma_final", f"{cost} after", form),
        ("compression", "compression", formats.ratio),
        ("loss", "loss", formats.figure),
        ("metric", metric or "metric", score),
        ("wall_s", "wall time", formats.seconds),
    )


def run_result(run: Run) -> dict[str, Any]:
    """A finished run, as every results file has it."""
    summary = run.summary or {}
    keys = ("seed", "steps", "target_reached_step", "fma_initial", "fma_final", "compression")
    # Without a target any loss counts as reached, and as held.
    aimless = {} if names_target(run) else {"target_reached_step": None, "held": None}
    found = {
        **{key: summary[key] for key in (*keys, "loss")},
        "metric": summary["metric"]["value"],
        **({"figures": figures} if (figures := summary.get("figures")) else {}),
        # Which held-out data these figures are of; null: those that also decided (version 0.1.0).
        "evaluated_on": summary.get("evaluated_on"),
        # Summaries of early builds lack some of these.
        **{key: summary.get(key) for key in ("held", "returns", "parameters_final")},
        # On a GPU, a resumed run is not bit-identical to an uninterrupted one.
        "resumed": [row["step"] for row in run.resumed if row["step"] < summary["steps"]],
        "before_cooldown": run.before_cooldown,
        "training_fma": summary["training_fma"],
        "wall_s": summary["wall_s"],
        "structure": summary["structure"],
    }
    return found | aimless


def origin_of(runs: Sequence[Run]) -> dict[str, Any]:
    """Command, commit, hardware, date and accounting of runs, as a results file has them."""
    dates = sorted(date for run in runs for date in run.environment_values("date"))
    return {
        **{key: _all(runs, key) for key in ("command", "commit", "hardware")},
        "date": dates[0] if dates[0] == dates[-1] else f"{dates[0]}/{dates[-1]}",
        "accounting": "; ".join(dict.fromkeys(run.accounting for run in runs)),
        "metric_name": "; ".join(dict.fromkeys(run.metric_name for run in runs)),
    }


def _all(runs: Sequence[Run], key: str) -> str | None:
    values = (value for run in runs for value in run.environment_values(key))
    return "; ".join(dict.fromkeys(values)) or None
