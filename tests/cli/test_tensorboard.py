"""TensorBoard while training: the figures of the log, the picture, and a missing extra."""

import importlib.util
import itertools
import json
import sys
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
from matplotlib.image import imsave

from gaugelasso.cli.tensorboard import TensorBoard, figures
from gaugelasso.runs.reading import read_rows
from gaugelasso.training.records import Progress
from tests.command import Command, assert_user_error
from tests.report.folders import event, initial_widths, make_run
from tests.tiny import tiny
from tests.tiny_runs import contents

needs_extra = pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed"
)
ROW = {"step": 50, "phase": "cooldown", "loss": 0.5, "accuracy": None, "fma": 250.0, "sites": 8,
       "parameters": 90, "lr": 0.1, "wall_s": 1.0}  # fmt: skip


def progress_at(end: int = 100, **changes: Any) -> Progress:
    return Progress({**ROW, **changes}, end, 0.05, 1000.0, "accuracy", 1.0)


class Writer:
    """Notes what it is given."""

    def __init__(self, folder: str, purge_step: int):
        self.scalars: list[tuple[str, float, int]] = []
        self.images: list[tuple[int, tuple[int, ...]]] = []
        self.opened = (folder, purge_step)
        Writer.last = self

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))

    def add_image(self, name: str, pixels: Any, step: int, dataformats: str) -> None:
        self.images.append((step, pixels.shape))

    def flush(self) -> None: ...

    def close(self) -> None: ...

    last: "Writer"


def write_config(folder: Path) -> Path:
    from gaugelasso.report.toml import to_toml

    path = folder / "tiny.toml"
    path.write_text(to_toml(tiny(folder).to_dict()))
    return path


def test_figures_are_those_of_the_row() -> None:
    assert figures(progress_at()) == {
        "loss/training": 0.5,
        "structure/work per token": 250.0,
        "structure/sites": 8.0,
        "structure/parameters": 90.0,
        "training/learning rate": 0.1,
        "structure/compression": 4.0,
    }
    assert figures(progress_at(accuracy=0.9))["metric/accuracy"] == 0.9


@pytest.fixture
def quick_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """To draw takes seconds; here it takes a second by the clock and gives one pixel."""
    clock = itertools.count()
    monkeypatch.setattr("gaugelasso.cli.tensorboard.perf_counter", lambda: next(clock))

    def draw(runs: Any, file: IO[bytes]) -> None:
        imsave(file, np.zeros((1, 1, 4)), format="png")

    monkeypatch.setattr("gaugelasso.report.profile.draw_profile", draw)


@pytest.mark.usefixtures("quick_picture")
def test_the_picture_is_drawn_where_the_structure_changed_and_time_allows(tmp_path: Path) -> None:
    board = TensorBoard(run := make_run(tmp_path / "r"), Writer)
    board.write(progress_at(step=10))
    board.write(progress_at(step=20))  # the same structure
    board.write(progress_at(step=30, fma=200.0))  # drawing has taken more than its share
    board.write(progress_at(step=40, fma=200.0, wall_s=1e6))
    board.write(progress_at(step=50, fma=200.0, parameters=80, wall_s=1e6))  # an exchange
    with (run / "events.jsonl").open("a") as log:
        log.write(json.dumps(event(60, 200.0, 150.0, {"D": 1}, [], initial_widths(2))) + "\n")
    board.write(progress_at(step=100, fma=150.0))  # the end
    assert [step for step, _ in Writer.last.images] == [10, 40, 50, 100]
    # A resumed run replaces the rows that it takes again.
    assert Writer.last.opened == (str(tmp_path / "r" / "tensorboard"), 10)


@pytest.mark.usefixtures("quick_picture")
@pytest.mark.parametrize("went_and_came_back", [True, False])
def test_the_last_picture_has_all_events(tmp_path: Path, went_and_came_back: bool) -> None:
    """The structure may be that of the last picture again."""
    board = TensorBoard(run := make_run(tmp_path / "r"), Writer)
    board.write(progress_at(step=50))
    if went_and_came_back:
        drop = event(60, 250.0, 200.0, {"D": 1}, [], initial_widths(2) | {"D": 7})
        back = event(70, 200.0, 250.0, {}, [], initial_widths(2)) | {"returned_to": 50}
        with (run / "events.jsonl").open("a") as log:
            log.writelines(json.dumps(each) + "\n" for each in (drop, back))
    board.write(progress_at(step=100))
    assert [step for step, _ in Writer.last.images] == [50, 100][: 1 + went_and_came_back]


def test_the_picture_is_the_profile(tmp_path: Path) -> None:
    TensorBoard(make_run(tmp_path / "r"), Writer).write(progress_at())
    assert Writer.last.images == [(50, (1120, 2000, 4))]


def test_a_folder_that_cannot_be_read_does_not_stop_the_run(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path, Writer)
    board.write(progress_at())
    assert Writer.last.images == []
    assert Writer.last.scalars


class FullDisk(Writer):
    def add_scalar(self, name: str, value: float, step: int) -> None:
        raise OSError(28, "No space left on device")

    def close(self) -> None:
        raise OSError(28, "No space left on device")


def test_a_full_disk_ends_the_writing_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    board = TensorBoard(tmp_path, FullDisk)
    board.write(progress_at())
    board.write(progress_at(step=60))
    board.close()
    (message,) = [record.getMessage() for record in caplog.records]
    assert "No space left on device" in message
    assert "no more is written" in message


def test_a_missing_extra_is_named_before_anything_is_written(
    gaugelasso: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_config(tmp_path)
    for name in [*sys.modules]:
        if name.startswith(("tensorboard", "torch.utils.tensorboard")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    before = contents(tmp_path)
    answer = gaugelasso("train", config, "--out", tmp_path / "run", "--tensorboard")
    assert_user_error(answer, "--tensorboard needs tensorboard")
    assert "pip install 'gaugelasso[tensorboard]'" in answer[2]
    assert contents(tmp_path) == before


@needs_extra
@pytest.mark.usefixtures("quick_picture")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_train_writes_what_the_log_has(gaugelasso: Command, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config, run = write_config(tmp_path), tmp_path / "run"
    answer = gaugelasso("train", config, "--out", run, "--tensorboard", "--device", "cpu")
    assert (run / "summary.json").exists(), answer
    found = EventAccumulator(str(run / "tensorboard"))
    found.Reload()
    rows = [*read_rows(run / "metrics.jsonl")]
    for tag, key in (("loss/training", "loss"), ("structure/work per token", "fma")):
        points = [(point.step, point.value) for point in found.Scalars(tag)]
        assert points == [(row["step"], pytest.approx(row[key])) for row in rows]
    assert found.Images("structural profile")[-1].step == rows[-1]["step"]
    # Another run in this folder does not inherit the figures.
    (run / "tensorboard" / "old").write_text("")
    gaugelasso("train", config, "--out", run, "--overwrite", "--device", "cpu")
    assert not (run / "tensorboard").exists()
