"""Simulates failures of the machine, many times; `make torture` writes the results.

    python -m tests.trust.torture --out results/reliability.json

Each part counts its tries and lists its faults; the exit code is 1 if there is any fault. With
--only PART, that part alone is done, and replaced in a file that has the others.
"""

import argparse
import errno
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from gaugelasso.runs.environment import environment
from gaugelasso.runs.writing import write_json
from tests.distributed.torture import lost_ranks
from tests.tiny_runs import assert_same_run, newest, read
from tests.trust.children import Runs, assert_intact, assert_resumes
from tests.trust.memory import memory_over_events, peaks_of_a_run
from tests.trust.traps import Bytes, Flushes, Lines, ReadOnly, Signals, Trap
from tests.trust.weighed import weigh_mutants
from tests.trust.weighed_foreign import weigh_foreign

Figures = dict[str, Any]


class Tally:
    """The number of tries of one kind, and their faults."""

    def __init__(self) -> None:
        self.tried = 0
        self.faults: list[str] = []

    def attempt(self, name: str, work: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of `work`; None if it failed."""
        self.tried += 1
        try:
            return work(*arguments)
        except Exception as error:  # one fault must not hide those after it
            self.faults.append(f"{name}: {type(error).__name__}: {str(error)[-300:]}")
            return None

    def figures(self) -> Figures:
        return {"tried": self.tried, "faults": self.faults}


# --- kill -9 ---------------------------------------------------------------------------------


def kills(runs: Runs, chance: random.Random) -> Figures:
    """Kill each run once, `--resume` it to the end, and compare it with the reference."""
    kinds: dict[str, Iterator[Callable[[str], bool]]] = {
        "at a random moment": _at_moments(runs, chance, 100),
        "inside a structural event": _in_lines(runs, Lines("event"), chance, 50),
        "inside a checkpoint write, between two lines": _in_lines(runs, Lines("save"), chance, 25),
        "inside a checkpoint write, in the middle of a file": _in_files(runs, chance, 25),
    }
    figures: Figures = {}
    for kind, deaths in kinds.items():
        tally, killed = Tally(), 0
        for number, die in enumerate(deaths):
            name = f"killed-{len(figures)}-{number}"
            killed += die(name)
            tally.attempt(name, assert_resumes, runs, "whole", name)
            shutil.rmtree(runs.home / name, ignore_errors=True)
        figures[kind] = tally.figures() | {"killed": killed}
        print(kind, figures[kind], flush=True)
    return figures


def _at_moments(runs: Runs, chance: random.Random, number: int) -> Iterator[Callable[[str], bool]]:
    seconds = runs.seconds("timed")

    def die(name: str) -> bool:
        # A run may end before the kill if it is faster than the one that was timed.
        while not runs.killed(name, chance.uniform(0, seconds)):
            shutil.rmtree(runs.home / name)
        return True

    yield from (die for _ in range(number))


def _in_lines(
    runs: Runs, trap: Lines, chance: random.Random, number: int
) -> Iterator[Callable[[str], bool]]:
    total = runs.count(f"count-{trap.where}", trap)
    for _ in range(number):
        at = chance.randint(1, total)
        yield lambda name, at=at: runs.run(name, trap=Lines(trap.where, at)) == -9


def _in_files(runs: Runs, chance: random.Random, number: int) -> Iterator[Callable[[str], bool]]:
    """Nearly all bytes that a run writes are checkpoints."""
    total = runs.count("sized", Bytes())
    for _ in range(number):
        at = chance.randint(1, total)
        yield lambda name, at=at: runs.run(name, trap=Bytes(at, error=None)) == -9


def many_kills(home: Path, chance: random.Random) -> Figures:
    """One run that is killed twenty times."""
    runs = Runs(home, ("train.log_every=1", "train.checkpoint_every=3", "train.steps=200"))
    assert runs.run("whole") == 0, runs.log("whole")
    killed = 0
    while killed < 20:
        killed += runs.killed("many", chance.uniform(0.2, 0.8), *(["--resume"] if killed else []))
    tally = Tally()
    tally.attempt("many", assert_resumes, runs, "whole", "many")
    return tally.figures() | {"kills in the run": killed}


# --- disks, folders, signals ---------------------------------------------------------------------


def faults(runs: Runs, chance: random.Random) -> Figures:
    """The run ends with one line and code 2, its newest checkpoint is intact, and it resumes."""
    total = runs.count("counted", Bytes())
    # After the first checkpoint, so that there is one to check.
    offsets = [chance.randint(total // 6, total) for _ in range(20)]
    kinds: dict[str, list[Trap]] = {
        "disk full": [Bytes(at) for at in offsets],
        "I/O error in a write": [Bytes(at, errno.EIO) for at in offsets[:10]],
        "I/O error in a flush": [Flushes(at) for at in range(40, 100, 6)],
        "read-only from a step on": [ReadOnly(at) for at in range(6, 36, 6)],
    }
    figures: Figures = {}
    for kind, traps in kinds.items():
        tally = Tally()
        for number, trap in enumerate(traps):
            name = f"fault-{len(figures)}-{number}"
            tally.attempt(name, _survives, runs, name, trap)
            shutil.rmtree(runs.home / name, ignore_errors=True)
        figures[kind] = tally.figures()
        print(kind, figures[kind], flush=True)
    return figures


def _survives(runs: Runs, name: str, trap: Trap) -> None:
    assert runs.run(name, trap=trap) == 2, runs.log(name)
    errors = [line for line in runs.log(name).splitlines() if line.startswith("error:")]
    assert len(errors) == 1, runs.log(name)
    assert "Traceback" not in runs.log(name)
    assert assert_intact(runs.home / "all", runs.home / name) > 0
    assert_resumes(runs, "whole", name)


def stops(runs: Runs, chance: random.Random) -> Figures:
    """Send SIGTERM and Ctrl-C at random moments."""
    figures: Figures = {}
    for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        tally, took = Tally(), [0.0]
        for index in range(10):
            name, rows = f"{number.name}-{index}", chance.randint(1, 35)
            took.append(tally.attempt(name, _stopped, runs, name, rows, number, code) or 0.0)
        figures[number.name] = tally.figures() | {"longest_s": round(max(took), 3)}
        print(number.name, figures[number.name], flush=True)
    return figures


def _stopped(runs: Runs, name: str, rows: int, number: int, code: int) -> float:
    """Return the seconds from the signal, sent after this many rows, to the exit of the process."""
    process = runs.start(name)
    log = runs.home / name / "metrics.jsonl"
    while not log.exists() or log.read_text().count("\n") < rows:
        time.sleep(0.002)
    began = time.perf_counter()
    os.kill(process.pid or 0, number)
    process.join()
    took = time.perf_counter() - began
    assert process.exitcode == code, runs.log(name)
    assert "stopped by" in runs.log(name)
    assert read(newest(runs.home / name) / "state.json")["steps"] >= rows
    assert took < 10
    assert_resumes(runs, "whole", name)
    return took


def two_runs(runs: Runs) -> Figures:
    """Start a second run on a folder in use; the parts above show that killed runs do not block."""
    tally = Tally()
    for option in ("--resume", "--overwrite"):
        tally.attempt(option, _refused, runs, option)
    return tally.figures()


def _refused(runs: Runs, option: str) -> None:
    name = f"shared{option}"
    # It stops itself; otherwise it could end before the second one starts.
    first = runs.start(name, trap=Signals(6, signal.SIGSTOP))
    try:
        while not (runs.home / name / "metrics.jsonl").exists():
            assert first.is_alive(), runs.log(name)
            time.sleep(0.002)
        code, message = runs.run(name, option), runs.log(name)
    finally:
        while first.is_alive():
            assert first.pid
            os.kill(first.pid, signal.SIGCONT)
            first.join(0.05)
    assert code == 2, message
    assert "is in use by another run" in message
    assert first.exitcode == 0
    assert_same_run(runs.home / "whole", runs.home / name)


# --- all of it -----------------------------------------------------------------------------------


def memory(home: Path) -> Figures:
    before, after, cut = memory_over_events(500)
    whole, resumed = peaks_of_a_run(home)
    growth, above = after / before - 1, resumed / whole - 1
    wrong = [f"memory grew by {growth:.1%} in 500 events"] if growth >= 0.02 else []
    wrong += [f"resuming took {above:.1%} more than training"] if above > 0.05 else []
    return {
        "events_that_cut": cut,
        "resident_mib_before": round(before / 2**20, 1),
        "resident_mib_after": round(after / 2**20, 1),
        "growth": round(growth, 4),
        "training_peak_mib": round(whole / 2**20, 1),
        "resuming_peak_mib": round(resumed / 2**20, 1),
        "resuming_above_training": round(above, 4),
        "faults": wrong,
    }


def tortured_runs(home: Path) -> Figures:
    runs, chance = Runs(home), random.Random(2026)
    assert runs.run("whole") == 0, runs.log("whole")
    keeping = Runs(home, (*runs.settings, "train.checkpoint_keep=99"))
    assert keeping.run("all") == 0, keeping.log("all")
    return _figures(
        {
            "kill -9, then --resume": lambda: kills(runs, chance),
            "twenty kills in one run": lambda: many_kills(_folder(home / "many"), chance),
            "failing disks": lambda: faults(runs, chance),
            "asked to stop": lambda: stops(runs, chance),
            "two runs on one folder": lambda: two_runs(runs),
        }
    )


# What needs no runs of the others, and can be done alone: part -> its work in a new folder.
OTHERS: dict[str, Callable[[Path], Figures]] = {
    "spoiled files": weigh_mutants,
    "spoiled files of other libraries": weigh_foreign,
    "memory": memory,
    "ranks lost": lambda home: lost_ranks(home, random.Random(2027)),
}


def tortured_others(home: Path) -> Figures:
    parts = {name: _in_folder(work, home / name) for name, work in OTHERS.items()}
    return _figures(parts)


def _in_folder(work: Callable[[Path], Figures], folder: Path) -> Callable[[], Figures]:
    return lambda: work(_folder(folder))


def torture(home: Path) -> Figures:
    # Two cores are enough for both. Processes and not threads: threads that start processes also
    # collect each other's, and of two that do so at once, one gets a wrong exit code.
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        both = [pool.submit(half, home) for half in (tortured_runs, tortured_others)]
        return {**both[0].result(), **both[1].result()}


def _figures(parts: dict[str, Callable[[], Figures]]) -> Figures:
    figures: Figures = {}
    for name, part in parts.items():
        began = time.perf_counter()
        figures[name] = part()
        print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)
    return figures


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


def _faults(figures: Any) -> list[str]:
    if not isinstance(figures, dict):
        return []
    inner = [fault for value in figures.values() for fault in _faults(value)]
    return [*figures.get("faults", []), *inner]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", choices=OTHERS)
    arguments = parser.parse_args()
    out, only = arguments.out, arguments.only
    began = time.perf_counter()
    about = environment("cpu") | {"command": "make torture"}
    with tempfile.TemporaryDirectory() as home:
        figures = torture(Path(home)) if only is None else OTHERS[only](Path(home))
    seconds = round(time.perf_counter() - began)
    if only is not None:
        command = f"python -m tests.trust.torture --out {out} --only {only!r}"
        measured = about | {"command": command, "seconds": seconds}
        before = json.loads(out.read_text())
        about, figures = before, {only: figures | {"measured": measured}}
        seconds = before["seconds"]
    wrong = _faults({**about, **figures})
    write_json(out, {**about, "seconds": seconds, "faults_in_all": len(wrong), **figures})
    print(*wrong, f"{len(wrong)} faults, {seconds} s: {out}", sep="\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
