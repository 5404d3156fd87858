"""Sweeps: many seeds and arms run at the same time, and one that fails does not stop the others."""

import io
import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gaugelasso.runs.reading import read_rows
from gaugelasso.sweeps import sweep
from gaugelasso.sweeps.arms import parse_arms
from gaugelasso.sweeps.sweep import Plan
from tests import warm
from tests.command import Command, assert_user_error, run_process, write_script
from tests.tiny import write_tiny
from tests.tiny_runs import contents, finish

# Above the largest seed: only this run is refused, in its own process.
BROKEN = 2**62 + 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seeds", "x"], "--seeds 'x': give numbers as in 42-46 or 1,5,9"),
        (["--seeds", "5-3"], "the range '5-3' ends before it starts"),
        (["--set", "train.stpes=5"], "did you mean 'steps'?"),
        (["--device", "tpu"], "device 'tpu' is unknown"),
        (["--resume", "--overwrite"], "exclude each other"),
        (["--arm", "a:", "--arm", "b: compress.trsut=4"], "--arm 'b': unknown key compress.trsut"),
        (["--arm", "a: train.steps=many"], "--arm 'a': train.steps = 'many': must be a whole"),
        (
            ["--arm", "a: target.metric=2 target.hold=final"],
            "--arm 'a': target.metric = 2: the best accuracy of any model is 1",
        ),
        (["--arm", "a:", "--arm", "A:"], "--arm 'A:': the folder 'a' is taken by the arm 'a'"),
        (["--arm", "a", "--results", "results.json"], "--arm 'a': write it as 'NAME: KEY=VALUE"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_starts_nothing(
    gaugelasso: Command, tmp_path: Path, arguments: list[str], message: str
) -> None:
    out = tmp_path / "out"
    assert_user_error(gaugelasso("sweep", write_tiny(tmp_path), "--out", out, *arguments), message)
    assert not out.exists()


@dataclass
class Sweep:
    """A sweep of two valid seeds and an invalid one, two runs at a time."""

    out: Path
    answer: tuple[int, str, str]
    side_by_side: list[int] = field(default_factory=list)
    before: dict[str, bytes] = field(default_factory=dict)

    @property
    def results(self) -> dict[str, Any]:
        return json.loads((self.out / "results.json").read_text())


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    """Run the command and count the processes that are alive whenever one starts."""
    folder = tmp_path_factory.mktemp("sweep")
    watch = (
        "import sys; from gaugelasso import cli; from gaugelasso.sweeps import sweep\n"
        "sys.argv[0] = 'gaugelasso'\n"
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
        [warm.python(), "-c", watch, *command], capture_output=True, text=True, timeout=300
    )
    lines = done.stderr.splitlines()
    alive = [int(line.split()[1]) for line in lines if line.startswith("alive ")]
    errors = "".join(line + "\n" for line in lines if not line.startswith("alive "))
    return Sweep(out, (done.returncode, done.stdout, errors), alive)


def test_one_failure_does_not_stop_the_rest(swept: Sweep) -> None:
    assert_user_error(swept.answer, f"1 of 3 runs failed: seeds {BROKEN}")
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
    origin = ["command", "commit", "hardware", "date", "accounting", "metric_name"]
    assert list(results) == [*origin, "runs"]
    assert results["command"].startswith("gaugelasso sweep ")
    assert f"--seeds {BROKEN},5,4 --jobs 2" in results["command"]
    assert results["accounting"] == "fma"
    assert [run["seed"] for run in results["runs"]] == [4, 5]
    for run in results["runs"]:
        assert list(run) == [
            "seed", "steps", "target_reached_step", "fma_initial", "fma_final", "compression",
            "loss", "metric", "evaluated_on", "held", "returns", "parameters_final", "resumed",
            "before_cooldown", "training_fma", "wall_s", "structure",
        ]  # fmt: skip
        folder = swept.out / f"seed{run['seed']}"
        row = next(row for row in read_rows(folder / "metrics.jsonl") if row["step"] == 30)
        before = {"step": 30, "loss": row["loss"], "metric": row["accuracy"], "fma": row["fma"]}
        assert run.pop("before_cooldown") == before
        assert run.pop("resumed") == []
        summary = json.loads((folder / "summary.json").read_text())
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
    """The runs, logs and results of the first sweep stay as they are."""
    before = contents(swept.out)
    config = write_tiny(swept.out.parent)
    code, _, err = gaugelasso("sweep", config, "--seeds", "4", "--out", swept.out)
    assert code == 2
    assert "Traceback" not in err
    assert contents(swept.out) == before


@pytest.mark.parametrize("where", [[], ["--cluster", "local"]], ids=["here", "cluster"])
def test_a_sweep_resumed_with_other_settings_starts_nothing(
    gaugelasso: Command, swept: Sweep, where: list[str]
) -> None:
    """Otherwise seeds that are new would be trained with these settings, beside the old ones."""
    before = contents(swept.out)
    options = ["--seeds", "4,77", "--out", swept.out, "--resume", "--set", "compress.trust=3.5"]
    answer = gaugelasso("sweep", write_tiny(swept.out.parent), *options, *where)
    assert_user_error(answer, "--resume: compress.trust = 3.5, but the run began with")
    assert contents(swept.out) == before


def test_a_log_that_cannot_be_written_starts_nothing(gaugelasso: Command, tmp_path: Path) -> None:
    """A folder in the place of a log has the effect of a read-only disk."""
    out = tmp_path / "out"
    (out / "seed5.log").mkdir(parents=True)
    answer = gaugelasso("sweep", write_tiny(tmp_path), "--seeds", "4-5", "--out", out)
    assert_user_error(answer, f"output '{out}/seed5.log' cannot be written: Is a directory")
    assert not (out / "seed4").exists()


def test_a_log_that_fails_later_stops_its_own_run_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full when the restart is noted in the log; the other run continues."""
    other = "until [ -e $0.1 ]; do sleep 0.05; done; sleep 0.5; exit 3"
    text = f'case "$*" in *seed=1*) touch $0.1; kill -9 $$;; esac; {other}'
    monkeypatch.setattr(sys, "executable", write_script(tmp_path / "python", text))
    monkeypatch.setattr(sweep, "_POLL_S", 0.05)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "seed1.log").symlink_to("/dev/full")
    plan = Plan(tmp_path / "c.toml", [1, 2], parse_arms([], tmp_path / "out"), jobs=2)
    output = io.StringIO()
    (outcome,) = sweep.run_sweep(plan, Console(file=output, width=200))
    assert outcome.failed == [1, 2]
    first = f"output '{tmp_path}/out/seed1.log' cannot be written: No space left on device"
    assert f"seed 1: failed with code 2, {first}" in output.getvalue()
    assert "seed 2: failed with code 3, see " in output.getvalue()


def test_a_killed_run_is_told_of_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "[ -e $0.died ] && exit 3; touch $0.died; kill -ABRT $$"
    monkeypatch.setattr(sys, "executable", write_script(tmp_path / "python", text))
    monkeypatch.setattr(sweep, "_POLL_S", 0.05)
    plan = Plan(tmp_path / "c.toml", [1], parse_arms([], tmp_path / "out"))
    output = io.StringIO()
    sweep.run_sweep(plan, Console(file=output, width=200))
    log = tmp_path / "out" / "seed1.log"
    expected = f"seed 1: killed by SIGABRT; starts again in 0 s; see {log}"
    assert expected in output.getvalue().splitlines()


# --- arms ----------------------------------------------------------------------------


ARMS = [
    "--arm",
    "base line:",
    "--arm",
    "Lost: compress.lr=1e30",
    "--arm",
    "k = 9: compress.trust=9",
]


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    """Three arms of one seed: the first is already finished, the second diverges."""
    folder = tmp_path_factory.mktemp("arms")
    out = folder / "out"
    done = finish(folder, "out/base-line/seed4", compress__trust=8, train__seed=4)
    before = {path: contents(done)[path] for path in ("metrics.jsonl", "events.jsonl")}
    command = ["sweep", folder / "tiny.toml", "--seeds", "4", "--jobs", "2", "--out", out, *ARMS]
    command += ["--set", "compress.trust=8", "--results", folder / "kept" / "all.json", "--resume"]
    return Sweep(out, run_process(*command, drawn=False), before=before)


def test_an_arm_that_fails_does_not_stop_the_rest(compared: Sweep) -> None:
    message = "1 of 3 runs failed: Lost, seeds 4; not in the results: Lost"
    assert_user_error(compared.answer, message)
    summary = json.loads((compared.out / "base-line" / "seed4" / "summary.json").read_text())
    assert f"base line, seed 4: done, step {summary['steps']}, " in compared.answer[1]
    log = compared.out / "lost" / "seed4.log"
    assert f"Lost, seed 4: failed with code 2, see {log}" in compared.answer[1]
    assert "loss or gradient is NaN or infinite" in log.read_text()


def test_results_of_arms_have_their_shape(compared: Sweep) -> None:
    results = compared.results
    origin = ["command", "commit", "hardware", "date", "accounting", "metric_name"]
    assert list(results) == [*origin, "arms"]
    assert "--arm 'Lost: compress.lr=1e30' --arm 'k = 9: compress.trust=9'" in results["command"]
    first, last = results["arms"]
    assert [arm["name"] for arm in (first, last)] == ["base line", "k = 9"]
    assert (first["changes"], last["changes"]) == ([], ["compress.trust=9"])
    kept = compared.out.parent / "kept" / "all.json"
    assert json.loads(kept.read_text()) == results
    for arm, folder in ((first, "base-line"), (last, "k-9")):
        alone = json.loads((compared.out / folder / "results.json").read_text())
        assert alone["runs"] == arm["runs"]
        assert alone["command"] == results["command"]
        assert (compared.out / folder / "report" / "index.html").exists()


def test_an_arm_changes_its_runs_on_top_of_the_rest(compared: Sweep) -> None:
    for folder, trust in (("base-line", 8.0), ("k-9", 9.0)):
        config = json.loads((compared.out / folder / "seed4" / "config.json").read_text())
        assert config["compress"]["trust"] == trust
        assert config["train"]["seed"] == 4


def test_arms_are_compared_at_the_end(compared: Sweep) -> None:
    table = (compared.out / "arms.md").read_text()
    assert table in compared.answer[1]
    assert [line.split(" | ")[0] for line in table.splitlines()[4:6]] == ["| base line", "| k = 9"]
    assert (compared.out / "arms.png").stat().st_size > 10_000


def test_arms_over_existing_runs_are_refused(gaugelasso: Command, compared: Sweep) -> None:
    before = contents(compared.out)
    config = write_tiny(compared.out.parent)
    arms = ["--arm", "new:", "--arm", "base line:"]
    answer = gaugelasso("sweep", config, "--seeds", "4", "--out", compared.out, *arms)
    assert_user_error(answer, "already exists; add --resume")
    assert contents(compared.out) == before


def test_a_resumed_sweep_does_not_train_again(compared: Sweep) -> None:
    folder = compared.out / "base-line" / "seed4"
    assert {path: contents(folder)[path] for path in compared.before} == compared.before
    assert (folder / "summary.json").exists()
