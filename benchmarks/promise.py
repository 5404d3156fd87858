"""Does a run end at the loss it names? Six tasks, two target losses and five seeds each.

    python benchmarks/promise.py --out runs/promise --results results/promise --jobs 16

Writes one file per task to the results folder, with one row for each run. Finished runs are not
trained again, so the command goes on where it was stopped. With `--baseline`, the smallest uniform
model of equal loss is searched for the first seed of each target loss (`gaugelasso baseline`).
"""

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gaugelasso.runs.environment import environment

ROOT = Path(__file__).parents[1]
# By task: its config, and the losses that are named.
TASKS: dict[str, tuple[str, tuple[float, float]]] = {
    "division": ("configs/ff31/small.toml", (0.02, 0.01)),
    "addition": ("configs/addition/small.toml", (0.2, 0.1)),
    "portraits": ("configs/mae/small.toml", (0.35, 0.3)),
    "retrieval": ("configs/retrieval/demo.toml", (0.05, 0.02)),
    "sorting": ("configs/sorting/small.toml", (0.1, 0.025)),
    "text": ("configs/charlm/small.toml", (2.5, 2.3)),
}
SEEDS = range(42, 47)


def command(*words: str) -> subprocess.CompletedProcess[str]:
    # One thread each: the runs are side by side.
    here = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": ""}
    words = (sys.executable, "-m", "gaugelasso", *words)
    return subprocess.run(words, cwd=ROOT, env=os.environ | here, capture_output=True, text=True)


def train(task: str, named: float, seed: int, out: Path) -> None:
    """One run; a run that misses its loss exits with 2 and still has a summary."""
    run, config = out / f"{task}-{named:g}-{seed}", TASKS[task][0]
    if (run / "summary.json").exists():
        return
    settings = [f"target.loss={named}", f"train.seed={seed}", "train.device=cpu"]
    changes = [word for setting in settings for word in ("--set", setting)]
    done = command("train", config, "--out", str(run), "--resume", *changes)
    if not (run / "summary.json").exists():
        raise SystemExit(f"{run}: {done.stderr[-2000:]}")


def uniform(task: str, named: float, out: Path, jobs: int) -> None:
    """The smallest uniform model of the first seed's loss."""
    run = out / f"{task}-{named:g}-{SEEDS[0]}"
    summary = json.loads((run / "summary.json").read_text())
    if summary["held"] and not (run / "baseline" / "baseline.json").exists():
        done = command("baseline", str(run), "--jobs", str(jobs))
        print(done.stdout[-2000:], done.stderr[-2000:])


def row(task: str, named: float, seed: int, out: Path) -> dict[str, Any]:
    run = out / f"{task}-{named:g}-{seed}"
    summary = json.loads((run / "summary.json").read_text())
    baseline = out / f"{task}-{named:g}-{SEEDS[0]}" / "baseline" / "baseline.json"
    found = json.loads(baseline.read_text()) if baseline.exists() else {"rows": []}
    fma = {each["name"]: each["fma"] for each in found["rows"]}
    return {
        "task": task,
        "seed": seed,
        "named_loss": named,
        "final_loss": summary["loss"],
        "ratio": summary["loss"] / named,
        "selection_loss": summary["selection_loss"],
        "held": summary["held"],
        "fma_initial": summary["fma_initial"],
        "fma": summary["fma_final"],
        "uniform_fma": fma.get(found.get("smallest_uniform")),
        "metric": summary["metric"],
        "steps": summary["steps"],
        "wall_s": summary["wall_s"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--baseline", action="store_true")
    parser.add_argument("--tasks", nargs="*", choices=sorted(TASKS), default=list(TASKS))
    given = parser.parse_args()
    out = given.out.absolute()
    pairs = [(task, named) for task in given.tasks for named in TASKS[task][1]]
    with ThreadPoolExecutor(given.jobs) as pool:
        runs = [pool.submit(train, *pair, seed, out) for pair in pairs for seed in SEEDS]
        for each in runs:
            each.result()
    if given.baseline:
        for pair in pairs:
            uniform(*pair, out, given.jobs)
    about = environment("cpu")
    given.results.mkdir(parents=True, exist_ok=True)
    for task in given.tasks:
        rows = [row(task, named, seed, out) for named in TASKS[task][1] for seed in SEEDS]
        within = sum(0.5 <= each["ratio"] <= 1 for each in rows)
        report = {**about, "config": TASKS[task][0], "rows": rows}
        (given.results / f"{task}.json").write_text(json.dumps(report, indent=1) + "\n")
        ratios = " ".join(f"{each['ratio']:.2f}" for each in rows)
        print(f"{task}: {within} of {len(rows)} between 0.5 and 1: {ratios}")


if __name__ == "__main__":
    main()
