"""Compression beside its rivals and controls, on the same task, data, steps and work count.

    python -m benchmarks.controls retrieval --seeds 42-46 --jobs 6 --out runs/controls \
        --results results/controls/retrieval.json
    python -m benchmarks.controls charlm --seeds 42 --arms scratch post-hoc cofi --out runs/lm \
        --results results/controls/charlm.json
    python -m benchmarks.controls faces --seeds 43-44 --arms compression uniform --out runs/faces \
        --set task.path=data/faces.npz --results results/controls/mae.json

An arm is one way to get a model, such as post-hoc pruning; `control_arms` has them. An arm that
starts from a run of another one, as rivals do from the full model, trains that first. After
`--seconds` no run starts, and those that run are stopped with their state saved; the same command
goes on with them. Runs side by side on a GPU share it through CUDA MPS.

The file of results has a row for each run that is finished; rows and commands of earlier calls
stay, and so does its note. A run whose row it has is not trained again, on whatever machine, unless
with `--again` or where another run starts from it.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.control_arms import ROOT, TASKS, Arm, Work, run_of
from benchmarks.kept_rows import JOINT, header

from gaugelasso.axes import named_tensors
from gaugelasso.baselines.ladder import Scale, ladder, settings_of
from gaugelasso.baselines.retrained import found_structure
from gaugelasso.compress.pricing import ACCOUNTINGS, total_fma
from gaugelasso.config import ModelConfig, load_config
from gaugelasso.errors import UserError
from gaugelasso.models import Transformer
from gaugelasso.report.compare_results import control_result, finite
from gaugelasso.report.data import load_run
from gaugelasso.report.formats import figure, known
from gaugelasso.report.results_schema import check_place
from gaugelasso.runs.writing import make_folder, write_json
from gaugelasso.sweeps.arms import parse_seeds
from gaugelasso.sweeps.mps import shared_gpu
from gaugelasso.training.evaluation import choose_device

COMMAND = (sys.executable, "-m", "gaugelasso")
Job = tuple[str, int]  # an arm and a seed


class Controls:
    """The runs of one task; each is made once, after the run that it starts from."""

    def __init__(self, name: str, given: argparse.Namespace):
        self.work, self.given = TASKS[name](given.fma), given
        self.end = time.monotonic() + given.seconds
        self._saving = threading.Lock()

    def folder(self, arm: str, seed: int) -> Path:
        out: Path = self.given.out
        return out / f"{arm}-{seed}"

    def make_all(self, jobs: Sequence[Job]) -> None:
        """The runs, some side by side, in this order but for those whose source is not made yet."""
        waiting, running, changed = list(jobs), set[Job](), threading.Condition()

        def ready() -> Job | None:
            pending = {*waiting, *running}
            return next((job for job in waiting if self.work.origin(*job) not in pending), None)

        def work(_: int) -> None:
            while True:
                with changed:
                    changed.wait_for(lambda: ready() or not waiting)
                    if not waiting:
                        return
                    job = ready()
                    assert job is not None
                    waiting.remove(job)
                    running.add(job)
                try:
                    self.make(*job)
                finally:
                    with changed:
                        running.remove(job)
                        changed.notify_all()

        with ThreadPoolExecutor(self.given.jobs) as pool:
            list(pool.map(work, range(self.given.jobs)))

    def make(self, name: str, seed: int) -> None:
        """Train one run, unless it is finished, its source is not, or the time is over."""
        folder, words = self.folder(name, seed), []
        if summary_of(folder) or time.monotonic() >= self.end:
            return
        if origin := self.work.origin(name, seed):
            source = self.folder(*origin)
            if not summary_of(source):
                return
            words = [str(source)]
        self._run(name, self.work.arms[name], seed, folder, words)

    def _run(self, name: str, arm: Arm, seed: int, folder: Path, words: list[str]) -> None:
        settings = [*self.given.set, *arm.settings]
        if arm.command == "train":
            words = [str(ROOT / arm.config)]
            settings.append(f"train.seed={seed}")
            if name in self.work.uniform:
                settings += uniform_settings(arm.config, self.work.uniform[name], self.work.fma)
            if arm.found:
                words += ["--structure", str(self._structure(folder, arm.found))]
        else:
            settings = []  # those of the run that it starts from
        changes = [word for pair in settings for word in ("--set", pair)]
        if folder.exists():
            changes.append("--resume")
        where = ["--out", str(folder), "--device", self.given.device]
        command = [arm.command, *words, *where, *arm.options, *changes]
        complaint = run_command(command, self.end)
        made = summary_of(folder)
        if made is None and time.monotonic() >= self.end:
            print(f"{name}, seed {seed}: stopped; the same command goes on with it", flush=True)
        elif made is None:
            print(f"{name}, seed {seed}: {' '.join(command)}\n{complaint}", flush=True)
        else:
            loss = known(made["loss"], figure)
            print(f"{name}, seed {seed}: {made['fma_final']:,.0f} FMA, loss {loss}", flush=True)
        self.save()

    def _structure(self, folder: Path, found: tuple[str, int]) -> Path:
        """A file with the structure that a run begins with, beside its folder."""
        path = folder.with_name(f"{folder.name}.json")
        write_json(path, found_structure(ROOT / "results" / found[0], run_of(*found)))
        return path

    def save(self) -> None:
        """Write the rows of all runs that are finished."""
        path: Path = self.given.results
        with self._saving:
            old = json.loads(path.read_text()) if path.exists() else {"runs": []}
            about = header(old, self.given.device)
            rows = {(row["method"], row["seed"]): row for row in old["runs"]}
            for row in self._rows():
                key = row["method"], row["seed"]
                if key not in rows or self.given.again:
                    rows[key] = row
            make_folder(path.parent)
            about |= self.work.about
            write_json(path, about | {"runs": [rows[key] for key in sorted(rows)]})

    def _rows(self) -> Iterator[dict[str, Any]]:
        for name, arm in self.work.arms.items():
            for folder in self.given.out.glob(f"{name}-*"):
                if not folder.name.removeprefix(f"{name}-").isdigit():
                    continue  # of an arm whose name begins with this one's
                if not (folder / "summary.json").exists():
                    continue
                try:
                    yield row_of(self.work.method(name), folder, arm.structure)
                except UserError as error:  # a damaged run does not cost the others their rows
                    print(f"left out: {error}", flush=True)


def in_order(
    work: Work, arms: Sequence[str], seeds: Sequence[int], there: Collection[Job] = ()
) -> list[Job]:
    """The runs that others start from first, then the arms as they are given.

    `there` are methods and seeds that need no run.
    """
    jobs = [(name, seed) for name in arms for seed in seeds]
    jobs = [(name, seed) for name, seed in jobs if (work.method(name), seed) not in there]
    sources = filter(None, (work.origin(*job) for job in jobs))
    return list(dict.fromkeys([*sources, *jobs]))


def rows_in(results: Path) -> set[Job]:
    """The methods and seeds that a results file has; none if there is no such file."""
    rows = json.loads(results.read_text())["runs"] if results.exists() else []
    return {(row["method"], row["seed"]) for row in rows}


def check_same(path: Path, work: Work) -> None:
    """UserError if a file is of runs of another task, or of rivals asked for another work."""
    found = json.loads(path.read_text()) if path.exists() else {}
    for key, now in work.about.items():
        if (before := found.get(key, now)) != now:
            raise UserError(
                f"{str(path)!r}: {key} is {before!r}, and now {now!r}; give the same task and "
                "--fma, or another --results and --out"
            )


def run_command(words: Sequence[str], end: float) -> str:
    """Run a command of the package; returns the end of its messages.

    At `end`, of the monotonic clock, it is told to stop, and saves its state.
    """
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    here = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    process = subprocess.Popen(
        [*COMMAND, *words], env=os.environ | here, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    left = end - time.monotonic()
    try:
        _, messages = process.communicate(timeout=None if math.isinf(left) else max(0.0, left))
    except subprocess.TimeoutExpired:
        process.terminate()
        _, messages = process.communicate()
    return messages[-1500:]


def uniform_settings(config: str, scale: Scale, fma: float) -> list[str]:
    """The sizes of the uniform model whose work is nearest."""
    loaded = load_config(ROOT / config)

    accounting = ACCOUNTINGS[loaded.compress.accounting]

    def distance(model: ModelConfig) -> float:
        made = Transformer(model.spec(loaded.task))
        return abs(total_fma(made.axis_table(), accounting, named_tensors(made)) - fma)

    return [*settings_of(min(ladder(loaded, scale), key=distance))]


def summary_of(folder: Path) -> dict[str, Any] | None:
    """What the run in a folder ended with; None if it is not finished."""
    path = folder / "summary.json"
    return json.loads(path.read_text()) if path.exists() else None


def row_of(method: str, run: Path, structure: bool = False) -> dict[str, Any]:
    """A finished run as a comparison has it, with its commit; its widths only for some tables."""
    found = load_run(run)
    row = finite(control_result(found))
    kept = {key: value for key, value in row.items() if key != "structure" or structure}
    commit = JOINT.join(dict.fromkeys(found.environment_values("commit"))) or None
    return {"method": method, **kept, "accounting": found.accounting, "commit": commit}


def parser_of() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=list(TASKS))
    parser.add_argument("--arms", nargs="+", help="Some of the task's arms; default: all.")
    parser.add_argument("--seeds", type=parse_seeds, default=[42])
    parser.add_argument("--fma", type=float, help="Work of the rivals; default: as in results/.")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=math.inf, help="Stop after this time.")
    parser.add_argument("--again", action="store_true", help="Also runs whose row is there.")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    return parser


def main(words: Sequence[str] | None = None) -> None:
    parser = parser_of()
    given = parser.parse_args(words)
    controls = Controls(given.task, given)
    arms = given.arms or list(controls.work.arms)
    if unknown := [name for name in arms if name not in controls.work.arms]:
        parser.error(f"{unknown[0]!r}: {given.task} has {', '.join(controls.work.arms)}")
    made = given.out / "controls.json"  # so that no run is taken for one of another work
    try:
        check_place(given.results, controls.work.about["task"])
        for path in (given.results, made):
            check_same(path, controls.work)
    except UserError as error:
        parser.error(str(error))
    there = set() if given.again else rows_in(given.results)
    jobs = in_order(controls.work, arms, given.seeds, there)
    make_folder(given.out)
    write_json(made, controls.work.about)
    side_by_side = given.jobs > 1 and choose_device(given.device).startswith("cuda")
    with shared_gpu(side_by_side):
        controls.make_all(jobs)
    controls.save()


if __name__ == "__main__":
    main()
