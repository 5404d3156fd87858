"""A run again: repeated, resumed, or refused; to the last bit, or left alone."""

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gaugelasso.errors import UserError
from gaugelasso.report import write_report
from gaugelasso.report.results import collect_results
from gaugelasso.runs import logs
from gaugelasso.runs.checkpoint import load_model
from gaugelasso.signals import Stopped
from tests.tiny_runs import (
    assert_same_run,
    contents,
    finish,
    finished,
    killed,
    newest,
    read,
    rows,
    sign,
    start,
    stop_at,
)
from tests.training.spoilers import empty, poison
from tests.trust.traps import Signals


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny run, finished."""
    return finished(tmp_path_factory.mktemp("trainer"))


# --- again ---------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_run(run: Path) -> None:
    assert_same_run(run, finish(run.parent, "again"))


def test_another_seed_gives_another_run(run: Path) -> None:
    other = finish(run.parent, "other", train__seed=4)
    losses, others = ([row["loss"] for row in rows(f, "metrics.jsonl")] for f in (run, other))
    assert all(loss != there for loss, there in zip(losses, others, strict=True))


@pytest.mark.parametrize("died_at", [23, 30, 38])
def test_a_resumed_run_equals_one_that_never_stopped(
    run: Path, tmp_path: Path, died_at: int
) -> None:
    killed(tmp_path, died_at)
    assert not (tmp_path / "run" / "summary.json").exists()
    start(tmp_path, existing="resume").run()
    assert_same_run(run, tmp_path / "run")


def test_a_checkpoint_between_two_rows_loses_nothing(run: Path) -> None:
    """Losses not yet logged and the last look at held-out data outlive a crash."""
    odd: dict[str, Any] = {"train__eval_every": 20, "train__checkpoint_every": 7}
    whole = finished(run.parent, "whole", **odd)
    killed(run.parent, 33, "died", **odd)
    assert read(newest(run.parent / "died") / "state.json")["steps"] == 28
    start(run.parent, "died", "resume", **odd).run()
    assert_same_run(whole, run.parent / "died")
    # Neither interval is part of the training itself.
    losses, plain_losses = (
        [row["loss"] for row in rows(folder, "metrics.jsonl")] for folder in (whole, run)
    )
    assert losses == plain_losses


def test_a_run_that_died_before_its_first_checkpoint_starts_over(run: Path, tmp_path: Path) -> None:
    killed(tmp_path, 8)
    assert rows(tmp_path / "run", "metrics.jsonl")
    start(tmp_path, existing="resume").run()
    assert_same_run(run, tmp_path / "run")


def test_a_crash_between_the_renames_of_a_checkpoint_loses_nothing(
    run: Path, tmp_path: Path
) -> None:
    killed(tmp_path, 23)
    path = newest(tmp_path / "run")
    path.rename(path.with_name(path.name + ".replaced"))
    trainer = start(tmp_path, existing="resume")
    assert trainer.compressor.steps == 20
    trainer.run()
    assert_same_run(run, tmp_path / "run")


def test_a_frozen_run_stays_frozen_when_resumed(tmp_path: Path) -> None:
    goal: dict[str, Any] = {"target__fma": 450, "train__saturation": 9}
    whole = finished(tmp_path, "whole", **goal)
    killed(tmp_path, read(whole / "summary.json")["steps"] - 1, "died", **goal)
    start(tmp_path, "died", "resume", **goal).run()
    assert_same_run(whole, tmp_path / "died")


def test_where_a_run_went_on_is_kept(tmp_path: Path) -> None:
    """Once for every checkpoint it went on from, however often it died before the next."""
    run = tmp_path / "run"
    killed(tmp_path, 8)
    for died_at in (13, 16, 27):  # checkpoints come every 10 steps
        stop_at(start(tmp_path, existing="resume"), died_at)
    start(tmp_path, existing="resume").run()
    seams = rows(run, "resumed.jsonl")
    assert [row["step"] for row in seams] == [10, 20]
    began = read(run / "environment.json")
    assert all(row.keys() == {"step", *began} for row in seams)
    results = collect_results([run])
    assert results["runs"][0]["resumed"] == [10, 20]
    start(tmp_path, existing="resume").run()  # from its end on: nothing
    assert collect_results([run])["runs"][0]["resumed"] == [10, 20]


def test_a_state_that_knows_of_no_earlier_seam_goes_on(run: Path, tmp_path: Path) -> None:
    """As early versions wrote it."""
    killed(tmp_path, 23)
    path = newest(tmp_path / "run")
    state = read(path / "state.json")
    del state["logs"]["resumed.jsonl"]
    (path / "state.json").write_text(json.dumps(state))
    sign(path)
    start(tmp_path, existing="resume").run()
    assert_same_run(run, tmp_path / "run")
    assert [row["step"] for row in rows(tmp_path / "run", "resumed.jsonl")] == [20]


def test_resuming_a_finished_run_changes_nothing(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    start(tmp_path, existing="resume").run()
    assert_same_run(run, tmp_path / "run")


def test_a_summary_stays_until_there_is_another(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(run, tmp_path / "run")
    trainer = start(tmp_path, existing="resume")
    monkeypatch.setattr(trainer, "_summary", lambda _: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(Stopped):
        trainer.run()
    assert read(tmp_path / "run" / "summary.json") == read(run / "summary.json")
    shutil.rmtree(newest(tmp_path / "run"))  # from an earlier step on it is no longer true
    start(tmp_path, existing="resume").folder.close()
    assert not (tmp_path / "run" / "summary.json").exists()


@pytest.mark.parametrize("name", ["environment.json", "initial.json"])
def test_what_reports_will_need_is_asked_for_before_training(
    run: Path, tmp_path: Path, name: str
) -> None:
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / name).write_text('{"x')
    with pytest.raises(UserError, match=rf"{name}': not a readable JSON file"):
        start(tmp_path, existing="resume")
    assert (tmp_path / "run" / "summary.json").exists()


@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("name", logs.NAMES)
def test_a_log_is_not_followed_elsewhere(tmp_path: Path, name: str, begun: bool) -> None:
    killed(tmp_path, 23 if begun else 8)
    log, thesis = tmp_path / "run" / name, tmp_path / "thesis.txt"
    thesis.write_bytes(log.read_bytes() or b"irreplaceable")
    log.unlink()
    log.symlink_to(thesis)
    before = thesis.read_bytes()
    with pytest.raises(UserError, match=rf"{name}'.*(cannot be (read|written))"):
        start(tmp_path, existing="resume")
    assert thesis.read_bytes() == before


def test_where_a_run_went_on_may_be_lost(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing hangs on it that is to come."""
    killed(tmp_path, 13)
    stop_at(start(tmp_path, existing="resume"), 23)
    (tmp_path / "run" / "resumed.jsonl").unlink()
    start(tmp_path, existing="resume").run()
    assert "resumed.jsonl': damaged, 0 bytes where" in caplog.text
    assert_same_run(run, tmp_path / "run")
    assert [row["step"] for row in rows(tmp_path / "run", "resumed.jsonl")] == [20]


def test_resuming_another_task_or_model_is_refused(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    for change in ({"task__vocabulary": 12}, {"model__width": 6}):
        with pytest.raises(UserError):
            start(tmp_path, existing="resume", **change)
    assert_same_run(run, tmp_path / "run")


def test_checkpoints_come_at_their_own_interval(tmp_path: Path) -> None:
    stop_at(start(tmp_path, train__log_every=20, train__checkpoint_every=5), 12)
    assert read(newest(tmp_path / "run") / "state.json")["steps"] == 10


# --- what is lost, and what is not -----------------------------------------------------


LOST: dict[str, tuple[str, Callable[[bytes], bytes | None]]] = {
    "events deleted": ("events.jsonl", lambda data: None),
    "metrics deleted": ("metrics.jsonl", lambda data: None),
    "head cut": ("metrics.jsonl", lambda data: data[data.index(b"\n") + 1 :]),
    "tail cut": ("metrics.jsonl", lambda data: data[: len(data) // 3]),
    "a digit changed": ("events.jsonl", lambda data: data.replace(b"1", b"2", 1)),
    "empty": ("events.jsonl", lambda data: b""),
}


@pytest.mark.parametrize("what", LOST)
def test_a_log_that_is_not_as_it_was_is_told(run: Path, tmp_path: Path, what: str) -> None:
    shutil.copytree(run, tmp_path / "run")
    name, change = LOST[what]
    path = tmp_path / "run" / name
    data = change(path.read_bytes())
    path.unlink()
    if data is not None:
        path.write_bytes(data)
    before = contents(tmp_path / "run")
    with pytest.raises(UserError, match=rf"{name}': damaged, .*--overwrite$"):
        start(tmp_path, existing="resume")
    assert contents(tmp_path / "run") == before


def test_rows_after_the_newest_checkpoint_may_be_damaged(run: Path, tmp_path: Path) -> None:
    """They were not flushed to the disk, and are written again."""
    killed(tmp_path, 28)
    path = tmp_path / "run" / "metrics.jsonl"
    *lines, last = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines) + bytes(len(last)) + b'\n{"step": 30}\n')
    start(tmp_path, existing="resume").run()
    assert_same_run(run, tmp_path / "run")


def test_logs_end_where_the_checkpoint_gone_back_to_knows_them_to(
    run: Path, tmp_path: Path
) -> None:
    killed(tmp_path, 28)
    empty(newest(tmp_path / "run"))
    trainer = start(tmp_path, existing="resume")
    assert trainer.compressor.steps == 10
    assert [row["step"] for row in rows(tmp_path / "run", "metrics.jsonl")] == [5, 10]
    trainer.run()
    assert_same_run(run, tmp_path / "run")


def test_a_damaged_checkpoint_takes_no_place_among_the_newest(tmp_path: Path) -> None:
    never: dict[str, Any] = {"target__loss": 1e-9}  # so none is kept for having held it
    with Signals(22), pytest.raises(Stopped):
        start(tmp_path, **never).run()
    ring = tmp_path / "run" / "checkpoints"
    empty(ring / "step-00000023")
    stop_at(start(tmp_path, existing="resume", **never), 32)
    names = ["step-00000020", "step-00000023.damaged", "step-00000030"]
    assert sorted(path.name for path in ring.iterdir()) == names
    empty(ring / "step-00000030")
    assert start(tmp_path, existing="resume", **never).compressor.steps == 20


@pytest.mark.parametrize(
    "mark", [{}, {"bytes": -1}, {"bytes": 10**400}, {"bytes": True}, {"sha256": "x"}, [], None]
)
def test_marks_that_are_none_are_refused(run: Path, tmp_path: Path, mark: Any) -> None:
    shutil.copytree(run, tmp_path / "run")
    path = newest(tmp_path / "run")
    state = read(path / "state.json")
    whole = state["logs"]["metrics.jsonl"]
    state["logs"]["metrics.jsonl"] = whole | mark if mark else mark
    (path / "state.json").write_text(json.dumps(state))
    sign(path)
    with pytest.raises(UserError, match=r"state\.json': not a run's state, logs = "):
        start(tmp_path, existing="resume")


@pytest.mark.parametrize("died_at", [28, None])
def test_a_run_whose_checkpoints_are_gone_does_not_start_over(
    run: Path, tmp_path: Path, died_at: int | None
) -> None:
    if died_at is None:
        shutil.copytree(run, tmp_path / "run")
    else:
        killed(tmp_path, died_at)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    before = contents(tmp_path / "run")
    has = "rows up to step 25" if died_at else "a summary"
    with pytest.raises(UserError, match=rf"has {has}, but no checkpoint .*--overwrite$"):
        start(tmp_path, existing="resume")
    assert contents(tmp_path / "run") == before
    start(tmp_path, existing="overwrite").run()
    assert_same_run(run, tmp_path / "run")


def test_a_run_that_never_had_a_checkpoint_starts_over(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        poison(patch, [9, 14])  # the last step whenever a checkpoint might be written
        stop_at(start(tmp_path), 17)
    assert rows(tmp_path / "run", "metrics.jsonl")[-1]["step"] > 10
    assert not (tmp_path / "run" / "checkpoints").exists()
    start(tmp_path, existing="resume").run()
    assert_same_run(run, tmp_path / "run")


@pytest.mark.usefixtures("undrawn")
def test_a_run_of_an_earlier_version_is_read_but_not_resumed(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    path = newest(tmp_path / "run")
    known = read(path / "state.json")
    older = {key: known[key] for key in known.keys() - {"held", "pending_fma", "logs"}}
    (path / "state.json").write_text(json.dumps(older))
    sign(path)
    assert load_model(tmp_path / "run").spec() == load_model(run).spec()
    assert write_report([tmp_path / "run"])
    with pytest.raises(UserError, match=r"state\.json': not a run's state, 'h.* is missing"):
        start(tmp_path, existing="resume")


def test_a_damaged_checkpoint_is_not_resumed_and_not_touched(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    for path in (tmp_path / "run" / "checkpoints").glob("*/optimizer.safetensors"):
        path.write_text("garbage")
    before = contents(tmp_path / "run")
    with pytest.raises(UserError, match=r"optimizer\.safetensors'.*no intact checkpoint"):
        start(tmp_path, existing="resume")
    assert contents(tmp_path / "run") == before


@pytest.mark.parametrize("pressure", [-0.5, 2.0, None, "half"])
def test_a_pressure_that_is_not_a_share_is_not_resumed(
    run: Path, tmp_path: Path, pressure: Any
) -> None:
    shutil.copytree(run, tmp_path / "run")
    path = newest(tmp_path / "run")
    state = read(path / "state.json")
    (path / "state.json").write_text(json.dumps({**state, "pressure": pressure}))
    sign(path)
    with pytest.raises(UserError, match=r"state\.json': not a run's state, pressure = "):
        start(tmp_path, existing="resume")


@pytest.mark.parametrize("state", ["{}", "[]", '{"steps": 40}'])
def test_a_state_without_its_keys_is_not_resumed(run: Path, tmp_path: Path, state: str) -> None:
    shutil.copytree(run, tmp_path / "run")
    path = newest(tmp_path / "run")
    (path / "state.json").write_text(state)
    sign(path)
    with pytest.raises(UserError, match=r"state\.json"):
        start(tmp_path, existing="resume").run()
