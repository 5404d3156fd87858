"""What every run writes while it trains: events, and a row of figures for each interval.

The trainer and a loop of the user's own write the same files. Decides nothing.
"""

import time
from typing import Any

from gaugelasso.compress.compressor import Compressor
from gaugelasso.compress.events import Event
from gaugelasso.runs.folder import RunFolderBase
from gaugelasso.training.records import RunRecord, metrics_row


class FolderLog:
    """Keeps the record of a run and writes the logs of its folder."""

    def __init__(self, folder: RunFolderBase, record: RunRecord, metric_name: str):
        self.folder, self.record, self.metric_name = folder, record, metric_name
        self.start_clock(0)

    def step(self, fma: float) -> None:
        self.record.training_fma += fma

    def event(self, event: Event) -> None:
        self.folder.append("events.jsonl", event.to_dict())
        if event.changed:
            self.record.cut_at = event.step

    def write_row(
        self, compressor: Compressor, phase: str, lr: float, step_s: float
    ) -> dict[str, Any]:
        """Append a row to metrics.jsonl; phase and rate are those of the last step."""
        model, record = compressor.model, self.record
        row = metrics_row(compressor, model, record, self.metric_name, phase, lr, step_s)
        self.folder.append("metrics.jsonl", row)
        return row

    # --- the clock ------------------------------------------------------------------------

    def start_clock(self, steps: int) -> None:
        """The run starts, or goes on, after so many steps."""
        self._began = time.perf_counter() - self.record.wall_s
        self.start_lap(steps)

    def start_lap(self, steps: int) -> None:
        """What was done since the last step is not counted as time of steps."""
        self._lap_at, self._lap_began = steps, time.perf_counter()

    def step_seconds(self, steps: int) -> float:
        """The mean time of a step since the lap started."""
        return (time.perf_counter() - self._lap_began) / max(steps - self._lap_at, 1)

    def read_clock(self) -> None:
        """Set the time of the run so far."""
        self.record.wall_s = time.perf_counter() - self._began
