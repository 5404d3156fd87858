"""The result of a baseline as JSON: one row per model, and where the figures come from."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gaugelasso.baselines.latency import latencies
from gaugelasso.baselines.members import Row, median_row, run_row
from gaugelasso.baselines.search import Found
from gaugelasso.baselines.setting import Bar
from gaugelasso.config import Config
from gaugelasso.runs.environment import environment


def collect(
    run: Path, config: Config, bar: Bar, seeds: Sequence[int], found: Found, how: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the content of baseline.json, without latencies. `how` are the command's choices."""
    run_own: Row = {"name": "run", "kind": "run", "widths": None, "scales": []}
    smallest = found.smallest
    return {
        "run": str(run),
        "task": config.task_name,
        "metric": config.task.metric_name,
        "accounting": config.compress.accounting,
        "loss": bar.loss,
        "tolerance": bar.tolerance,
        "limit": bar.limit,
        **{key: getattr(config.train, key) for key in ("steps", "warmup", "cooldown")},
        "seeds": list(seeds),
        **how,
        "full": found.full["name"],
        "smallest_uniform": smallest and smallest["name"],
        "smallest_is_bottom": found.at_bottom,
        "search_training_fma": sum(
            one["training_fma"] for row in found.rows for one in row["runs"]
        ),
        "rows": [{**run_own, **median_row([run_row(run, bar)], bar)}, *found.rows],
    }


def add_latencies_(result: dict[str, Any], config: Config, device: str, repeats: int) -> None:
    """Measure the models that are compared, and add the figures to their rows.

    Those are the run's, the full and the smallest uniform one. The retrained model has the
    structure of the run's, and so its latency.
    """
    names = dict.fromkeys(filter(None, ("run", result["full"], result["smallest_uniform"])))
    rows: dict[str, Row] = {row["name"]: row for row in result["rows"]}
    folders = {name: Path(rows[name]["runs"][0]["folder"]) for name in names}
    for name, measured in latencies(folders, config, device, repeats).items():
        rows[name].update(measured)
    for key in ("latency_ms", "latency_quartiles"):
        rows["retrained"][key] = rows["run"][key]
    found = environment(device)
    result["latency_device"] = device if device.startswith("cuda") else "cpu, 1 thread"
    result |= {key: found[key] for key in ("command", "commit", "hardware", "date")}
