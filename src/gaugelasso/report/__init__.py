"""Reports: what happened in a run, read off its folder. Imported by the command line alone."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gaugelasso.errors import UserError
from gaugelasso.report.data import Condition, load_condition, run_folders
from gaugelasso.report.layout import Table, to_markdown
from gaugelasso.report.saturation import saturation_table, shares_table
from gaugelasso.report.tables import before_after, events_table, run_tables, runs_table
from gaugelasso.runs.writing import write_text


@dataclass(frozen=True)
class ReportFiles:
    """Where the parts of a report lie."""

    page: Path
    profile: Path
    training: Path
    saturation: Path
    tables: Path
    samples: Path | None


def write_report(folders: Sequence[Path], out: Path | None = None) -> ReportFiles:
    """Report on one run, or on several that differ by seed alone; finished or not.

    A folder with runs in it, as a sweep makes it, stands for these runs. Goes to
    `out`, by default the folder "report" in the run or, for several runs, beside them.
    Files already there under the same names are replaced.
    """
    # matplotlib takes a second to load: commands that draw nothing need not wait for it.
    from gaugelasso.report.heatmap import draw_saturation
    from gaugelasso.report.page import write_page
    from gaugelasso.report.profile import draw_profile
    from gaugelasso.report.samples import draw_samples
    from gaugelasso.report.training import draw_training

    runs = load_condition(run_folders(folders))
    with _into(out or home(folders) / "report") as out:
        files = ReportFiles(
            page=out / "index.html",
            profile=out / "profile.png",
            training=out / "training.png",
            saturation=out / "saturation.png",
            tables=out / "tables.md",
            samples=out / "samples.png" if runs[0].samples() else None,
        )
        draw_profile(runs, files.profile)
        draw_training(runs, files.training)
        draw_saturation(runs, files.saturation)
        if files.samples:
            draw_samples(runs[0], files.samples)
        write_page(
            runs,
            files.page,
            profile=files.profile.read_bytes(),
            saturation=files.saturation.read_bytes(),
            training=files.training.read_bytes(),
            samples=files.samples.read_bytes() if files.samples else None,
        )
        tables = [before_after(runs), *([runs_table(runs)] if len(runs) > 1 else [])]
        tables += [saturation_table(runs), shares_table(runs)]
        tables += [*(table for run in runs for table in run_tables(run)), events_table(runs)]
        write_text(files.tables, "\n".join(map(to_markdown, tables)))
    return files


def write_comparison(arms: Sequence[Condition], table: Table, out: Path) -> None:
    """Arms side by side in the existing folder `out`: arms.md, arms.png."""
    from gaugelasso.report.tradeoff import draw_tradeoff

    with _into(out):
        write_text(out / "arms.md", to_markdown(table))
        draw_tradeoff(arms, out / "arms.png")


def write_pareto(paths: Sequence[Path], out: Path | None = None) -> tuple[Path, Path]:
    """Loss against work over finished runs of one task: a picture, and the table beside it.

    Go to `out`, by default the folder "pareto" where the runs lie.
    """
    from gaugelasso.report.pareto import draw_pareto, load_points, pareto_table

    points = load_points(paths)
    with _into(out or home(paths) / "pareto") as out:
        draw_pareto(points, picture := out / "pareto.png")
        write_text(table := out / "pareto.md", to_markdown(pareto_table(points)))
    return picture, table


def home(folders: Sequence[Path]) -> Path:
    """Where what is made of some runs goes: the one folder, or the one that all lie under."""
    if len(folders) == 1:
        return folders[0]
    return Path(os.path.commonpath([folder.absolute().parent for folder in folders]))


@contextlib.contextmanager
def _into(out: Path) -> Iterator[Path]:
    """The folder, made where it is missing; UserError names what cannot be written to it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder {str(out)!r} for the report: {error}") from None
    try:
        yield out
    except OSError as error:
        name, why = str(error.filename or out), error.strerror or error
        raise UserError(f"output {name!r} cannot be written: {why}") from None


__all__ = ["ReportFiles", "home", "write_comparison", "write_pareto", "write_report"]
