"""Runs on a cluster: submitit's local one, which queues and interrupts jobs as Slurm does."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from gaugelasso.errors import UserError
from gaugelasso.runs.reading import read_rows
from gaugelasso.sweeps.arms import parse_arms
from gaugelasso.sweeps.cluster import Cluster, Command, Submitted, parse_settings
from gaugelasso.sweeps.sweep import Plan, run_sweep
from gaugelasso.sweeps.worker import holder
from tests import warm
from tests.command import assert_user_error, run_process, until
from tests.tiny import write_tiny
from tests.tiny_runs import assert_same_run, read

# To run the GPU's tests, it need not be installed.
LocalJobEnvironment = pytest.importorskip("submitit.local.local").LocalJobEnvironment

pytestmark = pytest.mark.usefixtures("warm_python")
SETTINGS = {"timeout_min": "5"}


def test_a_sweep_on_a_cluster_is_a_sweep(tmp_path: Path) -> None:
    config, out = write_tiny(tmp_path), tmp_path / "out"
    command = ["sweep", config, "--seeds", "4", "--jobs", "2", "--out", out]
    command += ["--cluster", "local", "--cluster-set", "timeout_min=5"]
    code, message, _ = run_process(*command, drawn=False)
    assert code == 0, message
    assert [run["seed"] for run in read(out / "results.json")["runs"]] == [4]
    # The same command trains nothing again and gives the same results.
    before = read(out / "seed4" / "summary.json")
    assert run_process(*command, "--resume", drawn=False)[0] == 0
    assert read(out / "seed4" / "summary.json") == before | {
        "wall_s": read(out / "seed4" / "summary.json")["wall_s"]
    }


# The command line, with a run that waits at one step until it is stopped, if a file exists.
HELD = """
import pathlib, sys, time
from gaugelasso import cli
from gaugelasso.training.trainer import Trainer
hold, is_stopping = pathlib.Path(sys.argv.pop(1)), Trainer._is_stopping
def held(self, request):
    while self.compressor.steps == 20 and hold.exists() and not request.asked:
        time.sleep(0.01)
    return is_stopping(self, request)
Trainer._is_stopping = held
cli.main()
"""


def test_a_job_that_is_cut_off_goes_on_where_it_was(tmp_path: Path) -> None:
    """The cluster puts it back into the queue, as for a preemption."""
    config = write_tiny(tmp_path)

    def words(folder: Path) -> list[str]:
        command = [sys.executable, "-c", HELD, str(folder.with_suffix(".hold"))]
        command += ["train", str(config), "--out", str(folder)]
        return [*command, "--set", "train.log_every=1"]

    cluster = Cluster("local", SETTINGS, tmp_path)
    (tmp_path / "cut.hold").touch()
    cut = cluster.start(words(tmp_path / "cut"), tmp_path / "cut", tmp_path / "cut.log")
    until(lambda: len(list(read_rows(tmp_path / "cut" / "metrics.jsonl"))) == 19)
    preempt(cut)
    until(lambda: cut.poll() is not None)
    assert cut.returncode == 0, (tmp_path / "cut.log").read_text()
    assert "stopped by SIGTERM after step 20" in (tmp_path / "cut.log").read_text()
    whole = Command(words(tmp_path / "whole"), tmp_path / "whole", tmp_path / "whole.log")
    assert whole() == 0
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


def preempt(submitted: Submitted) -> None:
    """Send the signal that Slurm sends, to the process of the job."""
    for child in children(submitted._job._process.pid):
        os.kill(child, LocalJobEnvironment._usr_sig())


def children(pid: int) -> list[int]:
    pid = warm.worker_of(pid)
    try:
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:  # it has exited meanwhile
        return []


def family(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    return [pid, warm.worker_of(pid), *(each for child in children(pid) for each in family(child))]


def test_a_run_that_fails_there_fails_here(tmp_path: Path) -> None:
    config = write_tiny(tmp_path)
    arms = parse_arms([], tmp_path / "out")
    cluster = Cluster("local", SETTINGS, tmp_path / "out")
    plan = Plan(config, [4], arms, changes=["compress.lr=1e30"])
    outcomes = run_sweep(plan, Console(), cluster)
    assert outcomes[0].failed == [4]
    assert "is NaN or infinite" in (tmp_path / "out" / "seed4.log").read_text()


# --- broken off, and given again -----------------------------------------------------


def test_a_sweep_that_is_given_again_finds_its_jobs(tmp_path: Path) -> None:
    """Whether they are running or done, no job is submitted twice."""
    config, out = write_tiny(tmp_path), tmp_path / "out"
    command = ["sweep", config, "--seeds", "4", "--out", out, "--set", "train.steps=160"]
    command += ["--cluster", "local", "--cluster-set", "timeout_min=5"]
    words = [sys.executable, "-m", "gaugelasso", *map(str, command)]
    first = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until(lambda: (out / "jobs.json").exists() and holder(out / "seed4"))
    first.terminate()
    assert first.wait(timeout=120) == 128 + signal.SIGTERM
    code, message, _ = run_process(*command, drawn=False)
    assert code == 0, message
    assert [run["seed"] for run in read(out / "results.json")["runs"]] == [4]
    assert len(list((out / "jobs").glob("*_submitted.pkl"))) == 1
    assert "in use" not in (out / "seed4.log").read_text()
    assert read(out / "jobs.json") == {}
    # All results were collected, so the runs belong to an earlier sweep.
    assert_user_error(run_process(*command), "already exists; add --resume")


class Jobs:
    """Jobs that run a shell script each, submitted by sweeps one after the other."""

    def __init__(self, folder: Path):
        self.out, self.run, self.log = folder, folder / "seed4", folder / "seed4.log"
        self.started: list[Submitted] = []

    def start(self, text: str) -> Submitted:
        """Start a job as a new sweep process does."""
        words = ["sh", "-c", f'cd "{self.out}"; {text}', "run"]
        self.started.append(Cluster("local", SETTINGS, self.out).start(words, self.run, self.log))
        return self.started[-1]

    def kill(self) -> None:
        """Kill the remaining processes of the jobs that were started here."""
        for process in filter(None, (each._job._process for each in self.started)):
            if process.poll() is None:
                for pid in family(process.pid):
                    with contextlib.suppress(ProcessLookupError):  # it has exited
                        os.kill(pid, signal.SIGKILL)
                process.wait()

    def files(self, kind: str) -> list[Path]:
        return list((self.out / "jobs").glob(f"*_{kind}.pkl"))


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    jobs = Jobs(tmp_path)
    yield jobs
    jobs.kill()


def code(submitted: Submitted) -> int | None:
    until(lambda: submitted.poll() is not None)
    return submitted.returncode


def test_a_job_that_runs_is_found(jobs: Jobs) -> None:
    text = "touch at-work; until [ -e go ]; do sleep 0.05; done; exit 3"
    first = jobs.start(text)
    until((jobs.out / "at-work").exists)
    found = jobs.start(text)
    assert found.status == first.status
    assert found.poll() is None
    (jobs.out / "go").touch()
    assert code(found) == 3
    assert len(jobs.files("submitted")) == 1
    # A result that was collected is not collected again: the next sweep submits a new job.
    assert jobs.start("exit 0").status != first.status


def test_a_job_that_has_ended_meanwhile_is_collected(jobs: Jobs) -> None:
    first = jobs.start("exit 3")
    until(lambda: jobs.files("result"))
    found = jobs.start("exit 3")
    assert (found.status, code(found)) == (first.status, 3)
    assert len(jobs.files("submitted")) == 1


def test_a_summary_that_a_job_found_is_not_its_own_later(jobs: Jobs) -> None:
    jobs.run.mkdir()
    (jobs.run / "summary.json").write_text("{}")
    first = jobs.start("touch seed4/summary.json; exit 2")
    until(lambda: jobs.files("result"))
    found = jobs.start("touch seed4/summary.json; exit 2")
    assert first.summary_before == found.summary_before is not None
    assert (jobs.run / "summary.json").stat().st_mtime_ns != found.summary_before


def test_a_job_that_was_lost_is_submitted_again(jobs: Jobs) -> None:
    text = "[ -e lost ] && exit 0; touch at-work; sleep 600"
    first = jobs.start(text)
    until((jobs.out / "at-work").exists)
    jobs.kill()
    (jobs.out / "lost").touch()
    again = jobs.start(text)
    assert again.status != first.status
    assert code(again) == 0


def test_a_job_with_other_settings_is_not_taken_for_this_one(jobs: Jobs) -> None:
    first = jobs.start("until [ -e go ]; do sleep 0.05; done")
    with pytest.raises(UserError, match=r"already has a job \(\d+, --cluster local\) with other"):
        jobs.start("exit 0")
    assert len(jobs.files("submitted")) == 1
    (jobs.out / "go").touch()
    assert code(first) == 0


def test_other_settings_are_found_before_anything_starts(jobs: Jobs) -> None:
    (jobs.out / "jobs.json").write_text(
        '{"seed4": {"cluster": "local", "job": "1", "words": [], "summary_before": null}}'
    )
    plan = Plan(jobs.out / "tiny.toml", [3, 4], parse_arms([], jobs.out), jobs=2)
    with pytest.raises(UserError, match=r"seed4' already has a job"):
        run_sweep(plan, Console(), Cluster("local", SETTINGS, jobs.out))
    assert not jobs.files("submitted")
    assert not jobs.log.exists()


def test_a_job_that_slurm_does_not_know_is_waited_for_aloud(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After it is removed from jobs.json, as documented, its run is submitted again."""
    for name, message in (("srun", ""), ("sbatch", "job 7$(date +%N)"), ("sacct", "JobID|State")):
        (tmp_path / name).write_text(f'#!/bin/sh\necho "{message}"\n')
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    def start() -> Submitted:
        cluster = Cluster("slurm", SETTINGS, tmp_path)
        return cluster.start(["true"], tmp_path / "seed4", tmp_path / "seed4.log")

    first, found = start(), start()
    assert found.poll() is None
    assert found.status == first.status
    assert found.status.endswith(", unknown to the cluster")
    (tmp_path / "jobs.json").write_text("{}")
    assert start().status != first.status


@pytest.mark.parametrize("text", ["[]", "{", '{"seed4": 3}', '{"seed4": {"job": 3}}'])
def test_a_damaged_list_of_jobs_is_told(tmp_path: Path, text: str) -> None:
    (tmp_path / "jobs.json").write_text(text)
    with pytest.raises(UserError, match=r"jobs\.json'"):
        Cluster("local", SETTINGS, tmp_path)


def test_a_run_killed_inside_its_job_goes_on(jobs: Jobs) -> None:
    job = jobs.start('echo "run $1"; [ -e died ] && exit 0; touch died; kill -9 $$')
    assert code(job) == 0
    assert jobs.log.read_text().count("run --resume") == 2


def test_a_cluster_that_cannot_write_is_told(tmp_path: Path) -> None:
    (tmp_path / "jobs").touch()
    with pytest.raises(UserError, match="--cluster local: "):
        Cluster("local", SETTINGS, tmp_path)


@pytest.mark.parametrize("text", ["timeout_min", "=5", "timeout_min="])
def test_a_setting_is_a_key_and_a_value(text: str) -> None:
    with pytest.raises(UserError, match=r"write it as KEY=VALUE"):
        parse_settings([text])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--cluster", "sun_grid"], "--cluster sun_grid: "),
        (["--cluster", "local", "--cluster-set", "timeout=5"], "--cluster local: "),
        (["--cluster-set", "timeout_min=5"], "--cluster-set timeout_min=5 needs --cluster"),
        (["--cluster", "local", "--overwrite"], "--overwrite cannot be used with --cluster"),
    ],
)
def test_bad_words_start_nothing(tmp_path: Path, words: list[str], message: str) -> None:
    answer = run_process("sweep", write_tiny(tmp_path), "--out", tmp_path / "out", *words)
    assert_user_error(answer, message)
    assert not list((tmp_path / "out").glob("seed*"))
