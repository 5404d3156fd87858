"""Results files: the outcome of all seeds of one condition or of several arms, small to keep."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gaugelasso.report import words
from gaugelasso.report.data import Condition, Run, check_finished, load_condition
from gaugelasso.report.layout import Table, to_markdown


def collect_results(folders: Sequence[Path]) -> dict[str, Any]:
    """The results of finished runs of one condition, by seed.

    UserError where a run is not finished, or where the runs differ in more than their
    seed (task, model, target, accounting, ...). Commands, commits and hardware that
    differ are all listed, "; " between them; dates become "first/last".
    """
    runs = load_condition(folders)
    check_finished(runs)
    return {**_origin(runs), "runs": [_result(run) for run in runs]}


def collect_arms(arms: Sequence[Condition]) -> dict[str, Any]:
    """The results of several conditions in one file, in the order given."""
    return {
        **_origin([run for arm in arms for run in arm.runs]),
        "arms": [
            {
                "name": arm.name,
                "changes": list(arm.changes),
                "runs": [_result(run) for run in arm.runs],
            }
            for arm in arms
        ],
    }


def results_table(results: dict[str, Any], title: str) -> str:
    """A results file as a Markdown table: every seed, then mean ± standard deviation."""
    runs = results["runs"]
    cells = [
        [words.known(run.get(key), form) for run in runs]
        + ([words.over_seeds([run.get(key) for run in runs], form)] if len(runs) > 1 else [])
        for key, _, form in _COLUMNS
    ]
    names = [str(run["seed"]) for run in runs] + (["mean ± std"] if len(runs) > 1 else [])
    rows = [[name, *row] for name, row in zip(names, zip(*cells, strict=True), strict=True)]
    return to_markdown(
        Table(title, ["seed", *(name for _, name, _ in _COLUMNS)], rows, origin(results))
    )


def origin(results: dict[str, Any]) -> str:
    """Where the figures of a results file come from, as a table's note says it."""
    note = f"Accounting: {results['accounting']}. {results['hardware']}, {results['date']}, "
    return note + f"commit {results['commit'] or 'unknown'}. Command: {results['command']}"


_COLUMNS: tuple[tuple[str, str, words.Format], ...] = (
    ("steps", "steps", words.count),
    ("target_reached_step", "first batch within target", words.count),
    ("fma_initial", "FMA before", words.count),
    ("fma_final", "FMA after", words.count),
    ("compression", "compression", words.ratio),
    ("loss", "loss", words.figure),
    # A results file keeps no metric's name: the plain value, with figures for 99.996%.
    ("metric", "metric", "{:.5g}".format),
    ("wall_s", "wall time", words.seconds),
)


def _result(run: Run) -> dict[str, Any]:
    summary = run.summary or {}
    keys = ("seed", "steps", "target_reached_step", "fma_initial", "fma_final", "compression")
    return {
        **{key: summary[key] for key in (*keys, "loss")},
        "metric": summary["metric"]["value"],
        **({"figures": figures} if (figures := summary.get("figures")) else {}),
        # Summaries of early versions lack some of these.
        **{key: summary.get(key) for key in ("held", "returns", "parameters_final")},
        # Where it went on from a checkpoint, which on a GPU is another course.
        "resumed": [row["step"] for row in run.resumed if row["step"] < summary["steps"]],
        "before_cooldown": run.before_cooldown,
        "training_fma": summary["training_fma"],
        "wall_s": summary["wall_s"],
        "structure": summary["structure"],
    }


def _origin(runs: Sequence[Run]) -> dict[str, Any]:
    dates = sorted(date for run in runs for date in run.around("date"))
    return {
        **{key: _all(runs, key) for key in ("command", "commit", "hardware")},
        "date": dates[0] if dates[0] == dates[-1] else f"{dates[0]}/{dates[-1]}",
        "accounting": "; ".join(dict.fromkeys(run.accounting for run in runs)),
    }


def _all(runs: Sequence[Run], key: str) -> str | None:
    return "; ".join(dict.fromkeys(value for run in runs for value in run.around(key))) or None
