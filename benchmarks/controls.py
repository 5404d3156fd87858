"""Compression beside its rivals and controls, on the same task, data, steps and work count.

    python -m benchmarks.controls retrieval --seeds 42-46 --jobs 6 --out runs/controls \
        --results results/controls/retrieval.json
    python -m benchmarks.controls charlm --seeds 42 --arms scratch post-hoc cofi --out runs/lm \
        --results results/controls/charlm.json

An arm is one way to get a model, such as post-hoc pruning. An arm that starts from a run of another
arm (the full model, or the structure that compression found) trains that first. Rivals get the
work per token that compression reached in results/. Finished runs are not trained again, and a
stopped one goes on. No run starts after `--seconds`. The file of results has a row for each run
that is finished; rows of earlier commands stay.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gaugelasso.axes import named_tensors
from gaugelasso.baselines.ladder import Scale, ladder
from gaugelasso.compress.pricing import ACCOUNTINGS, total_fma
from gaugelasso.config import ModelConfig, load_config
from gaugelasso.models import Transformer
from gaugelasso.runs.environment import environment
from gaugelasso.runs.writing import make_folder, write_json
from gaugelasso.sweeps.arms import parse_seeds

ROOT = Path(__file__).parents[1]
# No pressure, and any loss will do.
PLAIN = ("compress.solver=fixed", "compress.rho=0", "target.hold=pressed", "target.loss=1e30")


@dataclass(frozen=True)
class Arm:
    """A command of the package. `source` is the arm whose run it starts from."""

    command: str
    config: str = ""
    source: str = ""
    settings: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Work:
    """A task: its arms, and the seed whose structure is trained from scratch.

    `fma` is the work of uniform models; the arms have that of the rivals.
    """

    arms: Mapping[str, Arm]
    donor: int
    fma: float = 0.0
    uniform: Mapping[str, Scale] = field(default_factory=dict)


def mean_work(result: str) -> float:
    runs = json.loads((ROOT / "results" / result).read_text())["runs"]
    return statistics.mean(run["fma_final"] for run in runs)


def retrieval(fma: float | None) -> Work:
    config = "configs/retrieval/paper.toml"
    fma = fma or mean_work("retrieval/population.json")
    to = ("--fma", f"{fma:.0f}")
    exchange, tied = ("compress.exchange=500",), ("model.norm=tied",)
    return Work(
        {
            "compression": Arm("train", config),
            "exchange": Arm("train", config, settings=exchange),
            "tied": Arm("train", config, settings=tied),
            "tied-exchange": Arm("train", config, settings=exchange + tied),
            "full": Arm("train", config, settings=PLAIN),
            "uniform-dims": Arm("train", config, settings=PLAIN),
            "uniform-heads": Arm("train", config, settings=PLAIN),
            "scratch": Arm("retrain", source="compression"),
            "post-hoc": Arm("prune", source="full", options=to),
            "cofi": Arm("cofi", source="full", options=to),
            "torch-pruning-magnitude": Arm("torch-pruning", source="full", options=to),
            "torch-pruning-group-norm": Arm(
                "torch-pruning", source="full", options=(*to, "--mode", "group-norm")
            ),
        },
        donor=45,
        fma=fma,
        uniform={"uniform-dims": "dims", "uniform-heads": "heads"},
    )


def division(_: float | None) -> Work:
    """Rivals are pruned to a loss, as in the paper, not to a work per token."""
    config, slow = "configs/ff31/paper.toml", "configs/ff31/slow.toml"
    # As in the paper: 30,000 steps and an anneal of 10,000, then a ceiling of the loss.
    full = (*PLAIN, "train.steps=40000", "train.cooldown=10000")
    ceiling = ("--loss", "0.1", "--channels", "20", "--corrective", "10", "--finetune", "10000")
    return Work(
        {
            "compression": Arm("train", config),
            "compression-slow": Arm("train", slow),
            "full": Arm("train", config, settings=full),
            "scratch": Arm("retrain", source="compression"),
            "post-hoc": Arm("prune", source="full", options=ceiling),
        },
        donor=43,
    )


def charlm(fma: float | None) -> Work:
    config, uniform = "configs/charlm/main.toml", "configs/charlm/uniform.toml"
    fma = fma or 7.6e6
    to = ("--fma", f"{fma:.0f}")
    # As in the paper: 10,000 steps of the full model, and 47,000 in all.
    full = (*PLAIN, "target.fma=0", "train.steps=10000", "train.cooldown=9500")
    full = (*full, "train.saturation=0")
    tuned = ("--finetune", "36000")
    return Work(
        {
            "compression": Arm("train", config),
            "uniform": Arm("train", uniform),
            "deep": Arm("train", "configs/charlm/deep.toml"),
            "loose": Arm("train", "configs/charlm/loose.toml"),
            "full": Arm("train", config, settings=full),
            "scratch": Arm("retrain", source="compression"),
            "post-hoc": Arm("prune", source="full", options=(*to, *tuned)),
            "cofi": Arm(
                "cofi",
                source="full",
                options=(*to, "--warmup", "5000", "--prune", "40000", "--finetune", "25000"),
            ),
            "torch-pruning-magnitude": Arm("torch-pruning", source="full", options=(*to, *tuned)),
        },
        donor=42,
    )


TASKS = {"retrieval": retrieval, "division": division, "charlm": charlm}


class Controls:
    """The runs of one task; each is made once, after the run that it starts from."""

    def __init__(self, name: str, given: argparse.Namespace):
        self.work, self.given = TASKS[name](given.fma), given
        self.end = time.monotonic() + given.seconds
        self._locks: dict[Path, threading.Lock] = {}
        self._guard = threading.Lock()

    def folder(self, arm: str, seed: int) -> Path:
        out: Path = self.given.out
        return out / f"{arm}-{seed}"

    def make(self, name: str, seed: int) -> None:
        """Train one run, unless it is finished or the time is over."""
        arm, folder = self.work.arms[name], self.folder(name, seed)
        with self._guard:
            lock = self._locks.setdefault(folder, threading.Lock())
        with lock:
            if summary_of(folder):
                return
            words: list[str] = []
            if arm.source:
                origin = self.work.donor if arm.command == "retrain" else seed
                self.make(arm.source, origin)
                source = self.folder(arm.source, origin)
                if not summary_of(source):
                    return
                words = [str(source)]
            if time.monotonic() >= self.end:
                return
            self._run(name, arm, seed, folder, words)

    def _run(self, name: str, arm: Arm, seed: int, folder: Path, words: list[str]) -> None:
        settings = [*self.given.set, *arm.settings]
        if arm.command == "train":
            words = [str(ROOT / arm.config)]
            settings.append(f"train.seed={seed}")
            if name in self.work.uniform:
                settings += uniform_settings(arm.config, self.work.uniform[name], self.work.fma)
        elif arm.command != "retrain":
            settings = []  # those of the run that it starts from
        changes = [word for pair in settings for word in ("--set", pair)]
        if arm.command == "retrain":
            changes = ["--seeds", str(seed)]
        elif folder.exists():
            changes.append("--resume")
        where = ["--out", str(folder), "--device", self.given.device]
        command = [arm.command, *words, *where, *arm.options, *changes]
        complaint = run_command(command)
        made = summary_of(folder)
        if made is None:
            print(f"{name}, seed {seed}: {' '.join(command)}\n{complaint}", flush=True)
        else:
            print(f"{name}, seed {seed}: {made['fma_final']:,.0f} FMA, loss {made['loss']:.4g}",
                  flush=True)  # fmt: skip
        self.save()

    def save(self) -> None:
        """Write the rows of all runs that are finished."""
        path: Path = self.given.results
        with self._guard:
            about = environment(self.given.device)
            old = json.loads(path.read_text())["runs"] if path.exists() else []
            rows = {(row["method"], row["seed"]): row for row in old}
            for name in self.work.arms:
                for folder in self.given.out.glob(f"{name}-*"):
                    seed = folder.name.removeprefix(f"{name}-")
                    summary = summary_of(folder) if seed.isdigit() else None
                    key = (name, int(seed)) if summary else None
                    if key and rows.get(key, {}).get("wall_s") != summary["wall_s"]:
                        rows[key] = row_of(*key, summary) | {"commit": about["commit"]}
            runs = [rows[key] for key in sorted(rows)]
            make_folder(path.parent)
            write_json(path, {**about, "runs": runs})


def run_command(words: Sequence[str]) -> str:
    """Run a command of the package; returns the end of its messages."""
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    here = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "gaugelasso", *words]
    done = subprocess.run(command, env=os.environ | here, capture_output=True, text=True)
    return done.stderr[-1500:]


def uniform_settings(config: str, scale: Scale, fma: float) -> list[str]:
    """The sizes of the uniform model whose work is nearest."""
    loaded = load_config(ROOT / config)

    accounting = ACCOUNTINGS[loaded.compress.accounting]

    def distance(model: ModelConfig) -> float:
        made = Transformer(model.spec(loaded.task))
        return abs(total_fma(made.axis_table(), accounting, named_tensors(made)) - fma)

    model = min(ladder(loaded, scale), key=distance)
    return [f"model.{key}={getattr(model, key)}" for key in ("width", "heads", "d_k", "d_v", "d_f")]


def summary_of(folder: Path) -> dict[str, Any] | None:
    """That of the run in this folder, or in the one below it; None if it is not finished."""
    found = [*folder.glob("summary.json"), *folder.glob("seed*/summary.json")]
    return json.loads(found[0].read_text()) if found else None


def row_of(method: str, seed: int, summary: Mapping[str, Any]) -> dict[str, Any]:
    """`training_fma` counts what a method needs beside its own steps."""
    keys = ("fma_initial", "fma_final", "loss", "metric", "held", "steps", "wall_s", "accounting")
    return {
        "method": method,
        "seed": seed,
        **{key: summary.get(key) for key in keys},
        "training_fma": summary["training_work"]["total"],
        "own_training_fma": summary["training_fma"],
    }


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=list(TASKS))
    parser.add_argument("--arms", nargs="+", help="Some of the task's arms; default: all.")
    parser.add_argument("--seeds", type=parse_seeds, default=[42])
    parser.add_argument("--fma", type=float, help="Work of the rivals; default: as in results/.")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    given = parser.parse_args(words)
    controls = Controls(given.task, given)
    arms = given.arms or list(controls.work.arms)
    if unknown := [name for name in arms if name not in controls.work.arms]:
        parser.error(f"{unknown[0]!r}: {given.task} has {', '.join(controls.work.arms)}")
    make_folder(given.out)
    # Runs that others start from come first.
    order = sorted(arms, key=lambda name: bool(controls.work.arms[name].source))
    jobs = [(name, seed) for name in order for seed in given.seeds]
    with ThreadPoolExecutor(given.jobs) as pool:
        list(pool.map(lambda job: controls.make(*job), jobs))
    controls.save()


if __name__ == "__main__":
    main()
