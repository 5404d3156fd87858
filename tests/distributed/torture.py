"""Ranks lost by the dozen: a part of `make torture`, or alone

python -m tests.distributed.torture --out results/ranks.json
"""

import argparse
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gaugelasso.runs.environment import environment
from gaugelasso.runs.writing import write_json
from tests.distributed.crews import CANONICAL, Crews, Fault
from tests.tiny_runs import assert_same_run, read

Figures = dict[str, Any]
SIZE, KILLS = 4, 20
# Enough steps for all kills, and checkpoints nearly as often.
SETTINGS = (*CANONICAL, "train.steps=40", "train.cooldown=10", "train.checkpoint_every=3")
# The longest that ranks may stay after one of them was lost.
LEFT_S = 30.0


def lost_ranks(home: Path, chance: random.Random) -> Figures:
    """One of four ranks killed at a random moment of training, then --resume; and torchrun."""
    crews = Crews(home, SETTINGS)
    crews.finish("one", 1)
    crews.finish("timed", SIZE)
    seconds = read(home / "timed" / "summary.json")["wall_s"]
    faults: list[str] = []
    took = []
    for number in range(KILLS):
        name = f"killed-{number}"
        try:
            took.append(_lose_one(crews, name, chance, seconds))
        except Exception as error:  # one fault must not hide those after it
            faults.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
        shutil.rmtree(home / name, ignore_errors=True)
    print(f"{KILLS} kills, {len(faults)} faults, longest {max(took):.1f} s", flush=True)
    return {
        "at a random moment": {
            "tried": KILLS,
            "faults": faults,
            "longest_s": round(max(took), 1),
            "mean_s": round(sum(took) / len(took), 1),
        },
        "torchrun --max-restarts, one run": _restarted(crews, chance),
    }


def _lose_one(crews: Crews, name: str, chance: random.Random, seconds: float) -> float:
    """Seconds from the kill until the others had left, each with its line."""
    victim = chance.randrange(SIZE)
    while True:
        crew = crews.start(name, SIZE)
        while not (crews.home / name / "metrics.jsonl").exists():
            time.sleep(0.005)
        crew.processes[victim].join(chance.uniform(0, seconds))
        crew.processes[victim].kill()
        began = time.perf_counter()
        codes = crew.wait()
        took = time.perf_counter() - began
        if codes[victim] == -9:
            break
        shutil.rmtree(crews.home / name)  # it had ended: that was no kill
    assert took < LEFT_S, took
    for rank in set(range(SIZE)) - {victim}:
        log = crews.log(name, rank)
        # Whoever had nothing left to ask of the victim came to the end.
        assert codes[rank] == 2 or (crews.home / name / "summary.json").exists(), log
        assert "Traceback" not in log, log
        assert codes[rank] == 0 or f"rank {victim} is gone" in log, log
    assert crews.run(name, SIZE, "--resume") == [0] * SIZE, crews.logs(name)
    assert_same_run(crews.home / "one", crews.home / name)
    return took


def _restarted(crews: Crews, chance: random.Random) -> Figures:
    """A rank dies at every other step; torchrun starts all again, each time."""
    kills = [Fault("kill", chance.randrange(SIZE), 1 + 2 * number) for number in range(KILLS)]
    done = crews.torchrun("restarted", SIZE, kills)
    faults = []
    try:
        assert done.returncode == 0, done.stderr[-300:]
        for kill in kills:
            assert f"rank {kill.rank} is gone" in done.stderr, kill
        # torch seeds its own generator anew in a process that was not forked.
        assert_same_run(crews.home / "one", crews.home / "restarted", ("model", "optimizer"))
    except AssertionError as error:
        faults.append(f"restarted: {str(error)[:300]}")
    return {"tried": 1, "kills in the run": KILLS, "faults": faults}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    about = environment("cpu") | {"command": "python -m tests.distributed.torture"}
    with tempfile.TemporaryDirectory() as home:
        figures = lost_ranks(Path(home), random.Random(2026))
    write_json(out, {**about, **figures})
    sys.exit(any(part["faults"] for part in figures.values()))


if __name__ == "__main__":
    main()
