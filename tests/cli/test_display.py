"""The display of a run in progress."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gaugelasso.cli.display import clock, plain_line, show_progress
from gaugelasso.training.records import Progress


def progress(**changes: Any) -> Progress:
    row = {
        "step": 50, "phase": "compression", "loss": 0.04321, "accuracy": 0.9876, "fma": 5000.0,
        "parameters": 700, "sites": 12, "operators": 3, "rho": 0.1, "lr": 0.01, "step_ms": 4.25,
        "wall_s": 10.0,
    } | changes  # fmt: skip
    return Progress(row, 200, 0.05, 20000.0, "accuracy", 75.0)


def test_a_line_of_text_shows_every_figure() -> None:
    assert plain_line(progress(), 9.5) == (
        "step     50/200  compression  loss 0.0432 (target 0.05)  accuracy 0.9876  "
        "FMA 5,000 (4.00x)  sites 12  operators 3  4.2 ms/step (from 9.5)  left 1:15"
    )
    assert "  4.2 ms/step  left 1:15" in plain_line(progress(), None)
    assert "accuracy -  " in plain_line(progress(accuracy=None), 9.5)
    assert "(from 9.5)  1,234 MiB  left" in plain_line(progress(memory_mib=1234.0), 9.5)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (61, "1:01"), (3725, "1:02:05")]
)
def test_the_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_lines_are_limited_in_time(tmp_path: Path) -> None:
    file = io.StringIO()
    with show_progress(Console(file=file), "title", tmp_path / "none") as on_progress:
        for step, wall in ((10, 0.1), (20, 0.2), (30, 2.5), (200, 2.6)):
            on_progress(progress(step=step, wall_s=wall))
    steps = [int(line.split("/")[0].split()[1]) for line in file.getvalue().splitlines()]
    assert steps == [10, 30, 200]  # the first, one after two seconds, the last


def test_a_terminal_shows_a_panel(tmp_path: Path) -> None:
    file, log = io.StringIO(), tmp_path / "metrics.jsonl"
    console = Console(file=file, force_terminal=True, width=100)
    with show_progress(console, "the title", log) as on_progress:
        on_progress(progress(step_ms=9.0, fma=20000.0))
    assert "9.0 ms" in file.getvalue()
    assert "from" not in file.getvalue()
    with show_progress(console, "the title", log) as on_progress:
        rows = [progress(step_ms=8.0, fma=20000.0).row] * 3 + [progress().row]
        log.write_text("".join(json.dumps(row) + "\n" for row in rows))
        on_progress(replace(progress(memory_mib=123.0), seconds_left=5.0))
    shown = file.getvalue()
    for part in ("the title", "4.00x", "0.9876", "from 8.0", "123 MiB", "compression", "0:05"):
        assert part in shown


def test_a_line_shows_the_target_that_there_is() -> None:
    named = progress()
    plain = replace(named, loss_target=None)
    assert "loss 0.0432  accuracy 0.9876  FMA" in plain_line(plain, None)
    metric = plain_line(replace(plain, metric_target=0.999), None)
    assert "loss 0.0432  accuracy 0.9876 (target 0.999)  FMA" in metric
    both = plain_line(replace(named, loss_target=0.05, metric_target=0.999), None)
    assert "loss 0.0432 (target 0.05)  accuracy 0.9876 (target 0.999)  FMA" in both
    pressed = plain_line(replace(named, pressed_loss=0.41234), None)
    assert "loss 0.0432 (target 0.412 for now, 0.05 at the end)  accuracy" in pressed
    for pressed_loss in (0.05, 0.015):
        line = plain_line(replace(named, pressed_loss=pressed_loss), None)
        assert "loss 0.0432 (target 0.05)  " in line
    assert "loss 0.0432  accuracy" in plain_line(replace(plain, pressed_loss=0.4), None)
    assert "x, target 1,500)" in plain_line(replace(plain, fma_target=1500.0), None)
