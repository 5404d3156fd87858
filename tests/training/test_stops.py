"""A run stopped by a signal, between two steps where anything is due, ends as one that was not."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from gaugelasso.config.target import TargetConfig
from gaugelasso.signals import Stopped
from tests.tiny_runs import assert_same_run, keep_images, newest, read, sign
from tests.training.target_runs import course_of, start
from tests.trust.traps import Signals

# Long enough that a course decides at every second step only.
LONG: dict[str, Any] = {"train__steps": 200, "train__log_every": 10, "train__checkpoint_every": 40}
# The pressed loss depends on the last losses: of work in the descent, of a loss in the last anneal.
WORK = TargetConfig(fma=250.0), {**LONG, "compress__lr": 0.01}
LOSS = TargetConfig(loss=2.0, hold="final"), {**LONG, "compress__lr": 0.005}


@pytest.mark.parametrize(
    ("run", "begun", "stops"), [(WORK, 41, (51, 53)), (LOSS, 131, (155, 165))], ids=["work", "loss"]
)
def test_a_stopped_run_goes_on_to_the_last_bit(
    tmp_path: Path, run: tuple[TargetConfig, dict[str, Any]], begun: int, stops: tuple[int, int]
) -> None:
    target, changes = run
    whole = start(tmp_path, target, "whole", changes=changes)
    keep_images(whole, begun)
    whole.run()
    shutil.move(tmp_path / str(begun), tmp_path / "run")
    for step in stops:
        with Signals(step - 1), pytest.raises(Stopped, match=f"after step {step}, which is saved"):
            start(tmp_path, target, existing="resume", changes=changes).run()
        assert len(course_of(tmp_path / "run")["deferred"]) == 1
    start(tmp_path, target, existing="resume", changes=changes).run()
    assert_same_run(whole.folder.path, tmp_path / "run")
    assert course_of(whole.folder.path) == course_of(tmp_path / "run")


def test_a_checkpoint_of_a_stop_by_an_earlier_version_is_resumed(tmp_path: Path) -> None:
    target, changes = WORK
    with Signals(50), pytest.raises(Stopped):
        start(tmp_path, target, changes=changes).run()
    path = newest(tmp_path / "run")
    state = read(path / "state.json")
    state["course"]["recent"] += state["course"].pop("deferred")
    (path / "state.json").write_text(json.dumps(state))
    sign(path)
    resumed = start(tmp_path, target, existing="resume", changes=changes)
    resumed.folder.close()
    assert resumed.state.numbers()["course"]["deferred"] == []
