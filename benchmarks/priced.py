"""Is a model that is priced in milliseconds faster than one that is priced in FMA?

    python -m benchmarks.priced configs/charlm/small.toml --batch 16 --length 64 --device cpu \
        --loss 2.5 --seeds 42 43 --out runs/small --results results/priced/small_cpu.json
    python -m benchmarks.priced configs/charlm/medium.toml --batch 96 --length 256 --device cuda \
        --loss 1.15 --out runs/medium --results results/priced/medium_h200.json

Measures a table of the device, trains the config with both accountings, at the same target loss and
with the same steps, and times the tuned inference forms in turns, at the batch and length of the
table. Finished runs are not trained again.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from benchmarks.engines import gaugelasso_model
from benchmarks.serving_case import Case

from gaugelasso.bench.stopwatch import in_turns
from gaugelasso.models import Transformer
from gaugelasso.runs.checkpoint import load_model
from gaugelasso.runs.environment import environment
from gaugelasso.runs.writing import make_folder, write_json

ROOT = Path(__file__).parents[1]
ACCOUNTINGS = ("fma", "latency")


def command(*words: str) -> None:
    """A command of the package. One that misses its target exits with 2 and has its result."""
    here = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    words = (sys.executable, "-m", "gaugelasso", *words)
    done = subprocess.run(words, env=os.environ | here, capture_output=True, text=True)
    if done.returncode not in (0, 2):
        raise SystemExit(f"{' '.join(words)}: {done.stderr[-2000:]}")


def settings(given: argparse.Namespace, **more: Any) -> list[str]:
    pairs = [*given.set, *(f"{key.replace('__', '.')}={value}" for key, value in more.items())]
    return [word for pair in pairs for word in ("--set", pair)]


def train(given: argparse.Namespace, table: Path, accounting: str, seed: int) -> Path:
    run = given.out / f"{accounting}-{seed}"
    if (run / "summary.json").exists():
        return run
    priced: dict[str, Any] = {"compress__accounting": accounting}
    if accounting == "latency":
        priced["compress__profile"] = table
    options = settings(given, target__loss=given.loss, train__seed=seed, **priced)
    device = ["--device", given.device]
    command("train", str(given.config), "--out", str(run), "--resume", *device, *options)
    if not (run / "summary.json").exists():
        raise SystemExit(f"{run}: the run did not end")
    return run


def served(given: argparse.Namespace, runs: list[Path], case: Case) -> list[list[float]]:
    """Milliseconds of each run's model, and of the initial one at the end, in turns."""
    models = [load_model(run) for run in runs]
    spec = json.loads((runs[0] / "initial.json").read_text())["structure"]
    models.append(Transformer(type(models[0].spec()).from_dict(spec)))  # type: ignore[attr-defined]
    actions = {str(i): gaugelasso_model(each, case)[1] for i, each in enumerate(models)}  # type: ignore[arg-type]
    times = in_turns(actions, case.device, given.repeats)
    return [[each / case.calls for each in times[name]] for name in actions]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--loss", type=float, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--length", type=int, required=True)
    parser.add_argument("--decode", action="store_true")
    parser.add_argument("--device", choices=["cpu", "cuda"], required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[42])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    given = parser.parse_args()
    make_folder(given.out)
    make_folder(given.results.parent)
    table = (given.out / "profile.json").absolute()
    if not table.exists():
        shape = ["--batch", str(given.batch), "--length", str(given.length)]
        shape += ["--decode"] if given.decode else []
        where = ["--device", given.device, "--out", str(table)]
        command("profile", str(given.config), *shape, *where, *settings(given))
    jobs = [(each, seed) for seed in given.seeds for each in ACCOUNTINGS]
    with ThreadPoolExecutor(given.jobs) as pool:
        runs = list(pool.map(lambda job: train(given, table, *job), jobs))
    phase = "decode" if given.decode else "prefill"
    torch.set_num_threads(1)  # as in training and in the table
    case = Case(phase, given.batch, given.length, given.device)  # type: ignore[arg-type]
    times = served(given, runs, case)
    rows = []
    for (accounting, seed), run, spent in zip(jobs, runs, times, strict=False):
        summary = json.loads((run / "summary.json").read_text())
        low, middle, high = statistics.quantiles(spent, n=4)
        rows.append({
            "accounting": accounting,
            "seed": seed,
            "named_loss": given.loss,
            "final_loss": summary["loss"],
            "held": summary["held"],
            "costs": summary["costs"],
            "ms": middle,
            "quartiles": [low, high],
            "widths": summary["widths"],
            "wall_s": summary["wall_s"],
        })  # fmt: skip
        print(f"{run.name}: loss {summary['loss']:.4f}, {middle:.3f} ms", flush=True)
    print(f"initial: {statistics.median(times[-1]):.3f} ms")
    about = environment(given.device)
    shape = {"phase": phase, "batch": given.batch, "length": given.length}
    report = {"config": str(given.config), **shape, "initial_ms": statistics.median(times[-1])}
    write_json(given.results, {**about, **report, "rows": rows})


if __name__ == "__main__":
    main()
