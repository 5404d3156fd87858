"""Compression beside its rivals on tasks that take a CPU core a minute.

    python -m benchmarks.small_rivals --out runs/small --results results/promise/rivals.json

`benchmarks.controls` does this at the paper's sizes. Here a run of `gaugelasso train` names the
loss of its config. Each rival has the work per token that this run ended with, a full model
trained with the run's rates and phases, and its command's defaults; pruning is followed by as many
steps as the full model had. Compression to this work, and a uniform model of it, are also trained
for three times the steps: the first has about the training work of the pruned models then, or less.
What has the target loss on the test data is given half of that work as well. Finished runs are not
made again, so the command goes on where it was stopped. A method that refuses has a row too. With
`--methods` only these are made, beside the runs that they begin with. The file keeps all other
rows, its commands and its note.
"""

import argparse
import json
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.control_arms import COFI_LAYERS, PLAIN, ROOT
from benchmarks.controls import row_of, uniform_settings
from benchmarks.kept_rows import write_beside
from benchmarks.promise import TASKS, command

from gaugelasso.config import load_config
from gaugelasso.config.target import TargetConfig
from gaugelasso.report.toml import to_toml
from gaugelasso.sweeps.arms import parse_seeds

# What `target.hold` chose for the compressed run, and plain training has to name.
RATES = {"compress": ("lr", "interval"), "train": ("lr_min", "warmup", "cooldown")}
MORE = 3  # times the steps
SHARES = (1.0, 0.5)  # of the work of the compressed run
NEAR = 1.1  # a rival that ends with more than this of the work asked for has not reached it
KEPT = ("fma_final", "loss", "metric", "training_fma", "wall_s", "fma_initial", "commit")
KEYS = ("task", "seed", "method")  # a row of the file is replaced by one with the same
# Runs of the first folders of a task and a seed.
SOURCES = ("compression", "full", "from scratch")
# Trained like the full model or the compressed run, at the work that is asked for.
TRAINED = ("compression-long", "uniform-long", "uniform")
# The command of a rival, and its options beside the work. STEPS stands for those of the full model.
STEPS = "STEPS"
RIVALS = {
    "post-hoc": ("prune", "--finetune", STEPS),
    "cofi": ("cofi",),
    "cofi-unbounded": ("cofi", "--mask-bound", "0"),
    "cofi-layers": ("cofi", *COFI_LAYERS),
    "torch-pruning-magnitude": ("torch-pruning", "--finetune", STEPS),
    "torch-pruning-isomorphic": (
        "torch-pruning", "--ranking", "isomorphic", "--finetune", STEPS,
    ),
    "torch-pruning-group-norm": (
        "torch-pruning", "--mode", "group-norm", "--finetune", STEPS,
    ),
}  # fmt: skip


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


@dataclass(frozen=True)
class Place:
    """A task and a seed, with the folder of all of its runs."""

    task: str
    seed: int
    base: Path

    @property
    def config(self) -> str:
        return TASKS[self.task][0]

    @property
    def named(self) -> float:
        return load_config(ROOT / self.config).target.loss

    def row(self, method: str, share: float, folder: Path, refused: str = "") -> dict[str, Any]:
        """A run, with what was asked of it and whether it has the loss at that work."""
        about = {"task": self.task, "seed": self.seed, "named": self.named, "method": method}
        asked = {**about, "share": share, "work": share * self.work}
        if not (folder / "summary.json").exists():
            return {**asked, "holds": False, "refused": " ".join(refused.split())}
        found = row_of(method, folder)
        # Nothing is quite as large as was asked: uniform models have steps, pruning has channels.
        small = found["fma_final"] <= NEAR * asked["work"]
        has_loss = found["loss"] is not None and found["loss"] <= self.named
        return {**asked, "holds": small and has_loss, **{key: found[key] for key in KEPT}}

    @property
    def work(self) -> float:
        """That of the compressed run."""
        summary = json.loads((self.base / "compression" / "summary.json").read_text())
        return float(summary["fma_final"])

    def with_work_named(self, share: float) -> Path:
        """A config that names this work, with more steps."""
        config, path = load_config(ROOT / self.config), self.base / f"{share:g}" / "work.toml"
        train = replace(config.train, steps=MORE * config.train.steps)
        target = TargetConfig(fma=round(share * self.work))
        named = replace(config, target=target, train=train)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(to_toml(named.to_dict()))
        return path

    def rivals(
        self, full: Path, settings: list[str], plain: list[str], methods: Collection[str]
    ) -> Iterator[dict[str, Any]]:
        """Each rival at the work of the compressed run, then at less while it has the loss."""
        train = json.loads((full / "config.json").read_text())["train"]
        longer = [f"train.{key}={MORE * train[key]}" for key in ("steps", "cooldown")]
        commands = {**dict.fromkeys(TRAINED, ("train",)), **RIVALS}
        for name in filter(methods.__contains__, commands):
            verb, *options = commands[name]
            for share in SHARES:
                folder = self.base / f"{share:g}" / name
                if name == "compression-long":
                    config = self.with_work_named(share)
                    refused = make(folder, verb, str(config), settings=settings)
                elif name in TRAINED:
                    sizes = uniform_settings(self.config, "dims", share * self.work)
                    changes = [*plain, *sizes, *(longer if name == "uniform-long" else [])]
                    refused = make(folder, verb, self.config, settings=changes)
                else:
                    to = (str(full), "--fma", f"{share * self.work:.0f}")
                    to += tuple(str(train["steps"]) if word == STEPS else word for word in options)
                    refused = make(folder, verb, *to, settings=[])
                row = self.row(name, share, folder, refused)
                yield row
                if not row["holds"]:
                    break

    def rows(self, methods: Collection[str]) -> list[dict[str, Any]]:
        """Some methods on a task, with a seed."""
        first, full = self.base / "compression", self.base / "full"
        settings = [f"train.seed={self.seed}", "train.device=cpu"]
        if wrong := make(first, "train", self.config, settings=settings):
            raise SystemExit(f"{first}: {wrong}")
        plain = [*settings, *PLAIN, *rates_of(first)]
        if wrong := make(full, "train", self.config, settings=plain):
            raise SystemExit(f"{full}: {wrong}")
        # Another seed than that of the run, whose weights made the structure.
        scratch = self.base / "scratch" / f"seed{self.seed + 100}"
        refused = ""
        if "from scratch" in methods and not (scratch / "summary.json").exists():
            where = ("--seeds", str(self.seed + 100), "--out", str(scratch.parent))
            refused = command("retrain", str(first), *where).stderr[-600:]
        folders = dict(zip(SOURCES, (first, full, scratch), strict=True))
        made = [name for name in SOURCES if name in methods]
        rows = [self.row(name, 1, folders[name], refused) for name in made]
        rows += self.rivals(full, settings, plain, methods)
        said = (
            f"{row['method']} {row['share']:g} {row.get('fma_final', 0):.0f} {row.get('loss')}"
            for row in rows
        )
        print(self.task, self.seed, *said, sep="\n    ", flush=True)
        return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--tasks", nargs="*", choices=sorted(TASKS), default=list(TASKS))
    every = [*SOURCES, *TRAINED, *RIVALS]
    parser.add_argument("--methods", nargs="*", choices=every, default=every)
    parser.add_argument("--seeds", type=parse_seeds, default=[42, 43, 44])
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    out = given.out.absolute()
    places = [
        Place(task, seed, out / f"{task}-{seed}") for seed in given.seeds for task in given.tasks
    ]
    with ThreadPoolExecutor(given.jobs) as pool:
        made = [pool.submit(place.rows, given.methods) for place in places]
        rows = [row for each in made for row in each.result()]
    write_beside(given.results, rows, KEYS)


if __name__ == "__main__":
    main()
