"""The pool of a sweep: its order, its progress, and damaged files of single runs."""

import io
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from gaugelasso.runs import reading
from gaugelasso.sweeps import sweep
from gaugelasso.sweeps.arms import ArmOutcome, failures_message, parse_arms
from gaugelasso.sweeps.sweep import Plan
from tests.command import Command, assert_user_error
from tests.report.folders import make_run
from tests.tiny import write_tiny


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[sweep._Job]:
    """The runs that a sweep starts, in order; each fails immediately."""
    jobs: list[sweep._Job] = []
    start = sweep._start

    def replace(*arguments: Any) -> sweep._Job:
        jobs.append(start(*arguments))
        return jobs[-1]

    monkeypatch.setattr(sweep, "_start", replace)
    monkeypatch.setattr(sys, "executable", "false")
    monkeypatch.setattr(sweep.time, "sleep", lambda _: jobs[-1].process.wait())  # type: ignore
    return jobs


def test_all_seeds_of_an_arm_come_before_the_next(runs: list[sweep._Job], tmp_path: Path) -> None:
    arms = parse_arms(["one:", "two:"], tmp_path)
    outcomes = sweep.run_sweep(Plan(tmp_path, [3, 1], arms, jobs=3), Console())
    assert [str(job) for job in runs] == [
        "one, seed 3",
        "one, seed 1",
        "two, seed 3",
        "two, seed 1",
    ]
    assert [(one.ended, sorted(one.failed)) for one in outcomes] == [([], [1, 3])] * 2
    message = "4 of 4 runs failed: one, seeds 1, 3; two, seeds 1, 3; not in the results: one, two"
    assert failures_message(outcomes, 2) == message


def test_an_older_summary_is_not_this_sweeps_unless_written_again(
    runs: list[sweep._Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The figures of a run that misses its target count if it wrote a new summary."""
    folder = make_run(tmp_path / "seed1")
    plan = Plan(tmp_path, [1], parse_arms([], tmp_path), existing="resume")

    def outcome() -> ArmOutcome:
        return sweep.run_sweep(plan, Console())[0]

    assert (outcome().ended, outcome().failed) == ([], [1])
    wait = sweep.time.sleep

    def write_again(seconds: float) -> None:
        wait(seconds)
        summary = folder / "summary.json"
        os.utime(summary, ns=(0, summary.stat().st_mtime_ns + 1))

    monkeypatch.setattr(sweep.time, "sleep", write_again)
    assert outcome().folders == [folder]


def test_progress_that_has_not_changed_is_printed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "_REPORT_S", 0.0)
    [arm] = parse_arms((), tmp_path)
    job = sweep._Job(ArmOutcome(arm), 7, SimpleNamespace(status=""))
    console, log = Console(file=io.StringIO()), job.folder / "metrics.jsonl"
    log.parent.mkdir()
    for step in (None, None, 10, 10, 20):
        if step:
            log.write_text(f'{{"step": {step}, "loss": 0.5, "fma": 7}}\n')
        sweep._report([job], console)
    lines = console.file.getvalue().splitlines()
    assert [line.split(": ")[1].split(",")[0] for line in lines] == [
        "starting",
        "step 10",
        "step 20",
    ]


def test_a_damaged_log_of_one_run_does_not_stop_the_others(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    assert sweep._last(run) == "step 100, loss 0.0500, FMA 100"
    (run / "metrics.jsonl").write_text("[]\n")
    assert "metrics.jsonl': its last line is damaged" in sweep._last(run)


def test_of_a_long_log_the_last_row_alone_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [f'{{"step": {step}, "loss": 0.5, "fma": 7}}\n' for step in range(5000)]
    log = tmp_path / "metrics.jsonl"
    read: list[bytes] = []
    parse = reading._row
    monkeypatch.setattr(reading, "_row", lambda line: read.append(line) or parse(line))
    for text, message in (
        ("", "starting"),
        (rows[0][:9], "starting"),
        (rows[0], "step 0, "),
        ("".join(rows), "step 4999, "),
        ("".join(rows) + rows[0][:9], "step 4999, "),
        ("".join(rows) + "x" * 2**17, "its last line is damaged"),
        ("".join(rows) + "x" * 2**17 + "\n", "its last line is damaged"),
    ):
        read.clear()
        log.write_text(text)
        assert message in sweep._last(tmp_path)
        assert len(read) <= 1


@pytest.mark.parametrize(
    "row",
    [
        '{"step": 100}',
        '{"step": 100, "loss": 0.5}',
        '{"step": 100, "loss": null, "fma": 7}',
        '{"step": 100, "loss": "x", "fma": 7}',
        '{"step": 100, "loss": 0.5, "fma": [7]}',
        f'{{"step": 100, "loss": 1{"0" * 400}, "fma": 7}}',
        "[]",
    ],
)
def test_a_damaged_last_row_is_a_warning_for_its_run(tmp_path: Path, row: str) -> None:
    run = make_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as log:
        log.write(row + "\n")
    assert sweep._last(run).startswith(f"warning: '{run}/metrics.jsonl': its last line is damaged")


@pytest.mark.usefixtures("undrawn")
def test_a_damaged_run_is_left_out_of_the_results(
    gaugelasso: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a row is damaged after its run ended, the others still have results."""
    for seed in (1, 2, 3):
        make_run(tmp_path / "out" / f"seed{seed}", seed=seed)
    with (tmp_path / "out" / "seed2" / "metrics.jsonl").open("a") as log:
        log.write('{"step": 110}\n')
    monkeypatch.setattr(sys, "executable", "true")
    monkeypatch.setattr(sweep, "_POLL_S", 0.05)
    # Runs that were written by hand have other settings.
    monkeypatch.setattr("gaugelasso.cli.sweeps.check_same_config", lambda *_, **__: None)
    command = ["sweep", write_tiny(tmp_path), "--seeds", "1-3", "--out", tmp_path / "out"]
    answer = gaugelasso(*command, "--resume")
    assert_user_error(answer, "1 of 3 runs failed: seeds 2")
    assert "warning: seed 2: " in answer[1]
    assert "left out of the results" in answer[1]
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [run["seed"] for run in results["runs"]] == [1, 3]
