"""The progress of a run: a live panel on a terminal, otherwise lines of text."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table

from gaugelasso.errors import UserError
from gaugelasso.runs.reading import read_rows
from gaugelasso.runs.step_time import initial_step_ms
from gaugelasso.runs.units import noun, number, unit
from gaugelasso.training.records import Progress

# Seconds between lines, so that a log file stays short.
_LINE_EVERY = 2.0
# Columns that not every model has.
_COUNTS = {"sites": "residual sites", "operators": "operators"}


@contextmanager
def show_progress(
    console: Console, title: str, log: Path, price: Callable[[Progress], str] | None = None
) -> Iterator[Callable[[Progress], None]]:
    """Yields the function that a trainer calls with each row, after the row is in the log.

    `log` is the run's metrics.jsonl, from which the initial step time is read. `price` says what
    the compression so far costs, and is shown with each row.
    """
    initial_ms: float | None = None
    known = False

    def find_initial_ms(progress: Progress) -> float | None:
        nonlocal initial_ms, known
        if not known:
            # The display must not stop a run because its log cannot be read.
            with suppress(UserError):
                initial_ms = initial_step_ms(read_rows(log), progress.fma_initial, going=True)
            known = initial_ms is not None or progress.row["fma"] != progress.fma_initial
        return initial_ms

    if not console.is_terminal:
        last = [float("-inf")]

        def line(progress: Progress) -> None:
            initial_ms = find_initial_ms(progress)
            wall = progress.row["wall_s"]
            if wall - last[0] >= _LINE_EVERY or progress.row["step"] >= progress.end:
                last[0] = wall
                text = plain_line(progress, initial_ms)
                text += f"  {price(progress)}" if price else ""
                console.print(text, highlight=False, soft_wrap=True)

        yield line
        return

    with Live(console=console, refresh_per_second=8) as live:

        def panel(progress: Progress) -> None:
            said = price(progress) if price else None
            grid = _panel_content(progress, find_initial_ms(progress), said)
            live.update(Panel(grid, title=title, padding=(1, 2)))

        yield panel


def plain_line(progress: Progress, initial_ms: float | None) -> str:
    """One row of metrics as a line of text, with the initial step time once it is known."""
    row = progress.row
    metric = row[progress.metric_name]
    shown = "-" if metric is None else f"{metric:.4f}"
    memory = f"{row['memory_mib']:,.0f} MiB  " if "memory_mib" in row else ""
    before = "" if initial_ms is None else f" (from {initial_ms:.1f})"
    counts = "".join(f"{name} {row[name]}  " for name in _COUNTS if name in row)
    return (
        f"step {row['step']:>6}/{progress.end}  {row['phase']:<11}  "
        f"loss {row['loss']:.4f}{_wanted_loss(progress)}  "
        f"{progress.metric_name} {shown}{_wanted(progress.metric_target)}  "
        f"{noun(progress.accounting)} {number(row['fma'], progress.accounting)} "
        f"({progress.compression:.2f}x{_work_target(progress)})  "
        f"{counts}{row['step_ms']:.1f} ms/step{before}  {memory}"
        f"left {clock(progress.seconds_left)}"
    )


def _loss_for_now(progress: Progress) -> float | None:
    """What the loss should be now; None if there is no target loss.

    In an anneal pressure may wait for a loss below the target: a margin, which need not be reached.
    """
    named, pressed = progress.loss_target, progress.pressed_loss
    return named if named is None or pressed is None else max(named, pressed)


def _wanted_loss(progress: Progress) -> str:
    """The target loss, and the one that the run presses towards until then."""
    named, now = progress.loss_target, _loss_for_now(progress)
    if named is None or now is None or f"{now:.3g}" == f"{named:.3g}":
        return _wanted(named)
    return f" (target {now:.3g} for now, {named:g} at the end)"


def _wanted(target: float | None) -> str:
    return "" if target is None else f" (target {target:g})"


def _work_target(progress: Progress) -> str:
    work = progress.fma_target
    return f", target {number(work, progress.accounting)}" if work else ""


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _panel_content(progress: Progress, initial_ms: float | None, price: str | None = None) -> Group:
    row = progress.row
    metric = row[progress.metric_name]
    before = "" if initial_ms is None else f", from {initial_ms:.1f}"
    target = _loss_for_now(progress)
    colour = "green" if target is None or row["loss"] <= target else "yellow"
    grid = Table.grid(padding=(0, 3))
    for _ in range(4):
        grid.add_column()
    cells = [
        ("step", f"{row['step']:,} of {progress.end:,}"),
        ("phase", row["phase"]),
        ("loss", f"[{colour}]{row['loss']:.4f}[/]{_wanted_loss(progress)}"),
        (
            progress.metric_name,
            ("-" if metric is None else f"{metric:.4f}") + _wanted(progress.metric_target),
        ),
        (
            unit(progress.accounting),
            number(row["fma"], progress.accounting) + _work_target(progress),
        ),
        ("compression", f"[bold]{progress.compression:.2f}x[/]"),
        *((label, str(row[name])) for name, label in _COUNTS.items() if name in row),
        ("step time", f"{row['step_ms']:.1f} ms{before}"),
        ("time left", clock(progress.seconds_left)),
    ]  # fmt: skip
    if "memory_mib" in row:
        cells.append(("memory", f"{row['memory_mib']:,.0f} MiB"))
    for left in range(0, len(cells), 2):
        pair = cells[left : left + 2]
        grid.add_row(*(part for name, value in pair for part in (f"[dim]{name}[/]", value)))
    said = [] if price is None else ["", price]
    return Group(grid, *said, "", ProgressBar(total=progress.end, completed=row["step"]))
