"""TensorBoard while a run trains: the figures of each row, and the profile picture.

Never stops a run: a picture that cannot be drawn is left out, and where a file cannot be written,
as on a full disk, writing ends with a warning.
"""

import contextlib
import io
import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

from gaugelasso.errors import UserError, first_line
from gaugelasso.report.data import load_run
from gaugelasso.runs.folder import TENSORBOARD
from gaugelasso.training.records import Progress

_logger = logging.getLogger(__name__)

# Pictures may take this share of the time of a run.
_PICTURE_SHARE = 0.02
# Column -> tag. The metric has a tag of its own; other columns are counts of the model.
_TAGS = {
    "loss": "loss/training",
    "fma": "structure/work per token",
    "lr": "training/learning rate",
    "rho": "training/rho",
    "step_ms": "training/step time (ms)",
    "memory_mib": "training/GPU memory (MiB)",
    "skipped": "training/skipped steps",
}
_LEFT_OUT = {"step", "phase", "wall_s"}


def find_writer() -> Any:
    """The class that writes; UserError with the command that installs it, if it is missing."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UserError(
            f"--tensorboard needs tensorboard ({first_line(error)}): "
            "pip install 'gaugelasso[tensorboard]'"
        ) from None
    return SummaryWriter


@contextlib.contextmanager
def tensorboard(
    folder: Path, on_progress: Callable[[Progress], None]
) -> Iterator[Callable[[Progress], None]]:
    """Yields a callback for the trainer that writes to TensorBoard, then calls `on_progress`."""
    board = TensorBoard(folder, find_writer())

    def both(progress: Progress) -> None:
        board.write(progress)
        on_progress(progress)

    try:
        yield both
    finally:
        board.close()


class TensorBoard:
    """Writes into the folder `tensorboard` of a run folder."""

    def __init__(self, folder: Path, writer_class: Any):
        self._folder, self._writer_class = folder, writer_class
        self._writer: Any = None
        self._ended = False
        self._drawn, self._events_drawn, self._drawing_s = (math.nan, 0), -1, 0.0

    def write(self, progress: Progress) -> None:
        """Write the figures of a row and, if the structure changed, the profile picture."""
        with self._ending_on_errors():
            self._write(progress)

    @contextlib.contextmanager
    def _ending_on_errors(self) -> Iterator[None]:
        """A file that cannot be written is no reason to lose a training."""
        try:
            yield
        except OSError as error:
            if not self._ended:
                _logger.warning(
                    "warning: TensorBoard: %s; no more is written to it", first_line(error)
                )
            self._ended = True

    def _write(self, progress: Progress) -> None:
        if self._ended:
            return
        row, step = progress.row, progress.row["step"]
        if self._writer is None:
            # Opened with the first row, when the run folder is there. Rows of a run before it that
            # was not saved are hidden: a resumed run writes them again.
            self._writer = self._writer_class(str(self._folder / TENSORBOARD), purge_step=step)
        for name, value in figures(progress).items():
            self._writer.add_scalar(name, value, step)
        structure = row["fma"], row["parameters"]
        free = self._drawing_s <= _PICTURE_SHARE * row["wall_s"]
        if (at_end := step >= progress.end) or (structure != self._drawn and free):
            self._draw(step, only_with_new_events=at_end)
            self._drawn = structure
        self._writer.flush()

    def _draw(self, step: int, only_with_new_events: bool) -> None:
        from matplotlib.image import imread

        from gaugelasso.report.axes_profile import draw_axes_profile
        from gaugelasso.report.profile import draw_profile

        began, picture = perf_counter(), io.BytesIO()
        with contextlib.suppress(UserError):
            run = load_run(self._folder)
            # A structure may be that of the last picture again, as after a rollback.
            if only_with_new_events and len(run.events) == self._events_drawn:
                return
            self._events_drawn = len(run.events)
            (draw_axes_profile if run.own_model else draw_profile)([run], picture)
            picture.seek(0)
            pixels = imread(picture, format="png")
            self._writer.add_image("structural profile", pixels, step, dataformats="HWC")
        self._drawing_s += perf_counter() - began

    def close(self) -> None:
        if self._writer is not None:
            with self._ending_on_errors():
                self._writer.close()


def figures(progress: Progress) -> dict[str, float]:
    """Tag -> value of a row; missing values are left out."""
    named = {progress.metric_name: f"metric/{progress.metric_name}", **_TAGS}
    values = {
        named.get(name, f"structure/{name}"): float(value)
        for name, value in progress.row.items()
        if name not in _LEFT_OUT and value is not None
    }
    return {**values, "structure/compression": progress.compression}
