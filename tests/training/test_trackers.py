"""examples/trackers.py: what a tracker gets is what the run has."""

from pathlib import Path

import pytest

from gaugelasso.report.toml import to_toml
from gaugelasso.runs.reading import read_rows
from tests.examples import example
from tests.tiny import tiny


class Tracker:
    """Keeps everything, as (step, values)."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log(self, values: dict[str, float], step: int) -> None:
        assert all(isinstance(value, int | float) for value in values.values())
        self.rows.append((step, values))


def test_the_callback_gets_every_row_of_the_log(tmp_path: Path) -> None:
    config, tracker = tmp_path / "tiny.toml", Tracker()
    config.write_text(to_toml(tiny(tmp_path).to_dict()))
    example("trackers").with_trainer(config, tmp_path / "run", tracker)
    rows = [*read_rows(tmp_path / "run" / "metrics.jsonl")]
    assert [step for step, _ in tracker.rows] == [row["step"] for row in rows]
    for (_, logged), row in zip(tracker.rows, rows, strict=True):
        assert (logged["loss"], logged["fma"]) == (row["loss"], row["fma"])
        assert logged["cooldown"] == (row["phase"] == "cooldown")


@pytest.mark.filterwarnings("ignore:loss_target")  # twenty steps are too few for it
def test_an_own_loop_logs_its_figures() -> None:
    tracker = Tracker()
    compressor = example("trackers").with_own_loop(tracker, steps=20, every=5)
    assert [step for step, values in tracker.rows if "loss" in values] == [5, 10, 15, 20]
    last = tracker.rows[-1][1]
    assert tracker.rows[-2][1]["fma"] == compressor.fma or "dropped" in tracker.rows[-2][1]
    assert last.keys() == {"final loss", "held"}


def test_the_tracker_of_the_script_prints(capsys: pytest.CaptureFixture[str]) -> None:
    example("trackers").Printed().log({"loss": 0.25, "fma": 24992.0}, step=50)
    assert capsys.readouterr().out == "step 50: loss 0.25, fma 24992\n"
