"""Many seeds side by side: all of them run, and one that fails stops nobody."""

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gaugelasso import sweep
from gaugelasso.errors import UserError
from gaugelasso.sweep import parse_seeds
from tests.test_cli import Command, _untouched_settings, assert_told, gaugelasso
from tests.test_config import write_tiny
from tests.training import contents

__all__ = ["_untouched_settings", "gaugelasso"]  # fixtures

# More than a seed may be: this run alone is refused, in its own process.
BROKEN = 2**62 + 1


@pytest.mark.parametrize(
    ("text", "seeds"),
    [
        ("7", [7]),
        ("42-46", [42, 43, 44, 45, 46]),
        ("1,5,9", [1, 5, 9]),
        ("1-3, 9", [1, 2, 3, 9]),
        ("3,1-4", [3, 1, 2, 4]),
        ("5-5", [5]),
    ],
)
def test_seeds_are_read(text: str, seeds: list[int]) -> None:
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize("text", ["x", "", "1,,2", "1-", "-1", "1-2-3", "1.5", "5-3"])
def test_what_are_no_seeds_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=f"--seeds {text!r}"):
        parse_seeds(text)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--seeds", "x"], "--seeds 'x': give numbers as in 42-46 or 1,5,9"),
        (["--seeds", "5-3"], "'5-3' runs backwards"),
        (["--set", "train.stpes=5"], "did you mean 'steps'?"),
        (["--device", "tpu"], "device 'tpu' is unknown"),
        (["--resume", "--overwrite"], "exclude each other"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_starts_nothing(
    gaugelasso: Command, tmp_path: Path, arguments: list[str], said: str
) -> None:
    out = tmp_path / "out"
    assert_told(gaugelasso("sweep", write_tiny(tmp_path), "--out", out, *arguments), said)
    assert not out.exists()


@dataclass
class Sweep:
    """A sweep of two good seeds and a broken one, two at a time."""

    out: Path
    answer: tuple[int, str, str]
    side_by_side: list[int] = field(default_factory=list)

    @property
    def results(self) -> dict[str, Any]:
        return json.loads((self.out / "results.json").read_text())


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    """Through the command, watching how many processes are alive as each one starts."""
    folder = tmp_path_factory.mktemp("sweep")
    watch = (
        "import sys; from gaugelasso import cli, sweep\n"
        "start, jobs = sweep._start, []\n"
        "def watched(*arguments):\n"
        "    jobs.append(start(*arguments))\n"
        "    alive = sum(job.process.poll() is None for job in jobs)\n"
        "    print('alive', alive, file=sys.stderr, flush=True)\n"
        "    return jobs[-1]\n"
        "sweep._start = watched\n"
        "cli.main()\n"
    )
    config, out = write_tiny(folder), folder / "out"
    command = ["sweep", str(config), "--seeds", f"{BROKEN},5,4", "--jobs", "2", "--out", str(out)]
    done = subprocess.run(
        [sys.executable, "-c", watch, *command], capture_output=True, text=True, timeout=300
    )
    lines = done.stderr.splitlines()
    alive = [int(line.split()[1]) for line in lines if line.startswith("alive ")]
    told = "".join(line + "\n" for line in lines if not line.startswith("alive "))
    return Sweep(out, (done.returncode, done.stdout, told), alive)


def test_one_failure_does_not_stop_the_rest(swept: Sweep) -> None:
    assert_told(swept.answer, f"1 of 3 runs failed: seeds {BROKEN}")
    for seed in (4, 5):
        assert (swept.out / f"seed{seed}" / "summary.json").exists()
        assert f"seed {seed}: done, step 40, " in swept.answer[1]
    log = swept.out / f"seed{BROKEN}.log"
    assert f"seed {BROKEN}: failed with code 2, see {log}" in swept.answer[1]
    assert "train.seed" in log.read_text()


def test_runs_go_side_by_side(swept: Sweep) -> None:
    assert len(swept.side_by_side) == 3
    assert max(swept.side_by_side) == 2


def test_results_have_their_shape(swept: Sweep) -> None:
    results = swept.results
    assert list(results) == ["command", "commit", "hardware", "date", "accounting", "runs"]
    assert results["command"].startswith("gaugelasso sweep ")
    assert f"--seeds {BROKEN},5,4 --jobs 2" in results["command"]
    assert results["accounting"] == "fma"
    assert [run["seed"] for run in results["runs"]] == [4, 5]
    for run in results["runs"]:
        assert list(run) == [
            "seed", "steps", "fma_initial", "fma_final", "compression", "loss", "metric",
            "wall_s", "structure",
        ]  # fmt: skip
        summary = json.loads((swept.out / f"seed{run['seed']}" / "summary.json").read_text())
        assert run == {key: summary[key] for key in run} | {"metric": summary["metric"]["value"]}


def test_every_run_has_its_seed(swept: Sweep) -> None:
    losses = set()
    for seed in (4, 5):
        config = json.loads((swept.out / f"seed{seed}" / "config.json").read_text())
        assert config["train"]["seed"] == seed
        losses.add((swept.out / f"seed{seed}" / "metrics.jsonl").read_text().split('"loss": ')[1])
    assert len(losses) == 2


def test_a_sweep_ends_with_a_report(swept: Sweep) -> None:
    assert (swept.out / "report" / "index.html").exists()
    assert "mean ± std" in swept.answer[1]


def test_a_sweep_over_existing_runs_is_refused(gaugelasso: Command, swept: Sweep) -> None:
    """Neither the runs nor their logs nor the results of the first sweep are touched."""
    before = contents(swept.out)
    config = write_tiny(swept.out.parent)
    code, _, err = gaugelasso("sweep", config, "--seeds", "4", "--out", swept.out)
    assert code == 2
    assert "Traceback" not in err
    assert contents(swept.out) == before


def test_an_interrupted_sweep_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[sweep._Job] = []

    def start(config: Path, seed: int, out: Path, *_: Any) -> sweep._Job:
        forever = [sys.executable, "-c", "import time; time.sleep(600)"]
        log = (out / f"seed{seed}.log").open("wb")
        jobs.append(sweep._Job(seed, out / f"seed{seed}", subprocess.Popen(forever), log))
        return jobs[-1]

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep, "_start", start)
    monkeypatch.setattr(sweep.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        sweep.run_sweep(tmp_path / "c.toml", [1, 2], tmp_path, 2, [], Console(), on_gpu=False)
    monkeypatch.undo()  # waiting for a process sleeps too
    assert len(jobs) == 2
    for job in jobs:
        job.log.close()
        assert job.process.wait(timeout=20) != 0
