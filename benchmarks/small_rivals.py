"""Compression beside its rivals on tasks that take a CPU core a minute.

    python -m benchmarks.small_rivals --out runs/small --results results/controls/small.json

`benchmarks.controls` does this at the paper's sizes. Here a run of `gaugelasso train` names the
loss of its config; each rival has the work per token that this run ended with, a full model
trained with the run's rates and phases, and its command's defaults. Finished runs are not made
again, so the command goes on where it was stopped. A rival that refuses the work has a row too.
"""

import argparse
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.control_arms import PLAIN
from benchmarks.controls import row_of, uniform_settings
from benchmarks.promise import TASKS, command

from gaugelasso.runs.environment import environment
from gaugelasso.runs.writing import write_json
from gaugelasso.sweeps.arms import parse_seeds

# What `target.hold` chose for the compressed run, and plain training has to name.
RATES = {"compress": ("lr", "interval"), "train": ("lr_min", "warmup", "cooldown")}
RIVALS = {
    "post-hoc": ("prune",),
    "cofi": ("cofi",),
    "torch-pruning-magnitude": ("torch-pruning",),
    "torch-pruning-group-norm": ("torch-pruning", "--mode", "group-norm"),
}


def make(folder: Path, *words: str, settings: list[str]) -> str:
    """Train one run; returns the end of its messages if there is no finished run after that."""
    if not (folder / "summary.json").exists():
        changes = [word for setting in settings for word in ("--set", setting)]
        again = ["--resume"] if folder.exists() else []
        done = command(*words, "--out", str(folder), *again, *changes)
        if not (folder / "summary.json").exists():
            return done.stderr[-600:]
    return ""


def rates_of(run: Path) -> list[str]:
    config = json.loads((run / "config.json").read_text())
    return [f"{part}.{key}={config[part][key]}" for part, keys in RATES.items() for key in keys]


def one(task: str, seed: int, out: Path) -> list[dict[str, Any]]:
    """All methods of a task and a seed."""
    config, base = TASKS[task][0], out / f"{task}-{seed}"
    first, full = base / "compression", base / "full"
    settings = [f"train.seed={seed}", "train.device=cpu"]
    if wrong := make(first, "train", config, settings=settings):
        raise SystemExit(f"{first}: {wrong}")
    work = json.loads((first / "summary.json").read_text())["fma_final"]
    plain = [*settings, *PLAIN, *rates_of(first)]
    if wrong := make(full, "train", config, settings=plain):
        raise SystemExit(f"{full}: {wrong}")
    folders, refused = {"compression": first, "full": full}, {}
    sizes = uniform_settings(config, "dims", work)
    refused["uniform"] = make(base / "uniform", "train", config, settings=[*plain, *sizes])
    folders["uniform"] = base / "uniform"
    for name, (verb, *options) in RIVALS.items():
        folders[name] = base / name
        to = (verb, str(full), "--fma", f"{work:.0f}", *options)
        refused[name] = make(base / name, *to, settings=[])
    # Another seed than that of the run, whose weights made the structure.
    folders["from scratch"] = base / "scratch" / f"seed{seed + 100}"
    if not (folders["from scratch"] / "summary.json").exists():
        where = ("--seeds", str(seed + 100), "--out", str(base / "scratch"))
        command("retrain", str(first), *where)
    rows = []
    for name, folder in folders.items():
        if (folder / "summary.json").exists():
            row = row_of(name, folder)
        else:
            row = {"method": name, "refused": " ".join(refused.get(name, "").split())}
        rows.append({"task": task, "work": work, **row, "seed": seed})
    print(task, seed, *(f"{row['method']} {row.get('loss', 'refused')}" for row in rows), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--tasks", nargs="*", choices=sorted(TASKS), default=list(TASKS))
    parser.add_argument("--seeds", type=parse_seeds, default=[42, 43, 44])
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    with ThreadPoolExecutor(given.jobs) as pool:
        made = [
            pool.submit(one, task, seed, given.out.absolute())
            for seed in given.seeds
            for task in given.tasks
        ]
        rows = [row for each in made for row in each.result()]
    write_json(given.results, {**environment("cpu"), "runs": rows})


if __name__ == "__main__":
    main()
