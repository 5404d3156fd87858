"""Sweeps: many seeds and arms run at the same time, and one that fails does not stop the others."""

import io
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from gaugelasso.runs import reading
from gaugelasso.runs.reading import read_rows
from gaugelasso.sweeps import sweep
from gaugelasso.sweeps.arms import ArmOutcome, failures_message, parse_arms
from gaugelasso.sweeps.sweep import Plan
from tests import warm
from tests.command import Command, assert_user_error, run_process, write_script
from tests.report.folders import make_run
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
    assert list(results) == ["command", "commit", "hardware", "date", "accounting", "runs"]
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
    assert list(results) == ["command", "commit", "hardware", "date", "accounting", "arms"]
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


# --- the pool, with runs that take no time -------------------------------------------


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


@pytest.mark.parametrize("starts", [True, False])
def test_a_gpu_is_shared_where_it_can_be(
    starts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA MPS starts and ends with the sweep; if it was running before, it stays."""
    calls = tmp_path / "calls"
    control = tmp_path / "nvidia-cuda-mps-control"
    code = 0 if starts else 1
    control.write_text(
        f'#!/bin/sh\n[ -n "$1" ] && echo $1 >> {calls} && exit {code}\ncat >> {calls}\n'
    )
    control.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with sweep._shared_gpu():
        assert calls.read_text() == "-d\n"
    assert calls.read_text() == ("-d\nquit\n" if starts else "-d\n")


def test_without_mps_a_sweep_goes_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with sweep._shared_gpu():
        pass


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
    command = ["sweep", write_tiny(tmp_path), "--seeds", "1-3", "--out", tmp_path / "out"]
    answer = gaugelasso(*command, "--resume")
    assert_user_error(answer, "1 of 3 runs failed: seeds 2")
    assert "warning: seed 2: " in answer[1]
    assert "left out of the results" in answer[1]
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [run["seed"] for run in results["runs"]] == [1, 3]
