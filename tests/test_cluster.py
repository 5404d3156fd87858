"""Runs on a cluster: submitit's local one, which queues and cuts off as Slurm does."""

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from submitit.local.local import LocalJobEnvironment

from gaugelasso.cluster import Cluster, Command, Submitted, parse_settings
from gaugelasso.errors import UserError
from gaugelasso.runs import read_rows
from gaugelasso.sweep import parse_arms, run_sweep
from tests.test_cli import assert_told, for_real
from tests.test_config import write_tiny
from tests.training import assert_same_run, read

SETTINGS = {"timeout_min": "5"}


def test_a_sweep_on_a_cluster_is_a_sweep(tmp_path: Path) -> None:
    config, out = write_tiny(tmp_path), tmp_path / "out"
    command = ["sweep", config, "--seeds", "4", "--jobs", "2", "--out", out]
    command += ["--cluster", "local", "--cluster-set", "timeout_min=5"]
    code, said, _ = for_real(*command)
    assert code == 0, said
    assert [run["seed"] for run in read(out / "results.json")["runs"]] == [4]
    # Given again it trains nothing anew, and says the same.
    before = read(out / "seed4" / "summary.json")
    assert for_real(*command, "--resume")[0] == 0
    assert read(out / "seed4" / "summary.json") == before | {
        "wall_s": read(out / "seed4" / "summary.json")["wall_s"]
    }


def test_a_job_that_is_cut_off_goes_on_where_it_was(tmp_path: Path) -> None:
    """Given back to the queue by the cluster, as by a preemption."""
    config = write_tiny(tmp_path)
    changes = ["--set", "train.steps=400", "--set", "train.log_every=1"]

    def words(folder: Path) -> list[str]:
        command = [sys.executable, "-m", "gaugelasso", "train", str(config), "--out", str(folder)]
        return [*command, *changes, "--resume"]

    cluster = Cluster("local", SETTINGS, tmp_path)
    cut = cluster.start(words(tmp_path / "cut"), tmp_path / "cut.log")
    until(lambda: len(list(read_rows(tmp_path / "cut" / "metrics.jsonl"))) > 20)
    preempt(cut)
    until(lambda: cut.poll() is not None)
    assert cut.returncode == 0, (tmp_path / "cut.log").read_text()
    assert "stopped by SIGTERM after step" in (tmp_path / "cut.log").read_text()
    whole = Command(words(tmp_path / "whole"), tmp_path / "whole.log")
    assert whole() == 0
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


def preempt(submitted: Submitted) -> None:
    """The signal that Slurm sends, to the process that does the job."""
    controller = submitted._job._process.pid
    children = Path(f"/proc/{controller}/task/{controller}/children").read_text().split()
    for child in children:
        os.kill(int(child), LocalJobEnvironment._usr_sig())


def until(come: Any, most_s: float = 120) -> None:
    began = time.monotonic()
    while not come():
        assert time.monotonic() - began < most_s
        time.sleep(0.1)


def test_a_run_that_fails_there_fails_here(tmp_path: Path) -> None:
    config = write_tiny(tmp_path)
    arms = parse_arms([], tmp_path / "out")
    cluster = Cluster("local", SETTINGS, tmp_path)
    wrong = ["--set", "compress.lr=1e30"]
    outcomes = run_sweep(config, [4], arms, 1, wrong, Console(), on_gpu=False, cluster=cluster)
    assert outcomes[0].failed == [4]
    assert "not a number" in (tmp_path / "out" / "seed4.log").read_text()


@pytest.mark.parametrize("text", ["timeout_min", "=5", "timeout_min="])
def test_a_setting_is_a_key_and_a_value(text: str) -> None:
    with pytest.raises(UserError, match=r"write it as KEY=VALUE"):
        parse_settings([text])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--cluster", "sun_grid"], "--cluster sun_grid: "),
        (["--cluster", "local", "--cluster-set", "timeout=5"], "--cluster local: "),
        (["--cluster-set", "timeout_min=5"], "--cluster-set timeout_min=5: for use with --cluster"),
        (["--cluster", "local", "--overwrite"], "--overwrite with --cluster: "),
    ],
)
def test_bad_words_start_nothing(tmp_path: Path, words: list[str], said: str) -> None:
    answer = for_real("sweep", write_tiny(tmp_path), "--out", tmp_path / "out", *words)
    assert_told(answer, said)
    assert not list((tmp_path / "out").glob("seed*"))
