"""Reports: what happened in a run, read off its folder. Imported by the command line alone."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gaugelasso.errors import UserError
from gaugelasso.report.data import Condition, load_condition
from gaugelasso.report.layout import Table, to_markdown
from gaugelasso.report.tables import before_after, events_table, run_tables, runs_table


@dataclass(frozen=True)
class ReportFiles:
    """Where the parts of a report lie."""

    page: Path
    profile: Path
    training: Path
    tables: Path


def write_report(folders: Sequence[Path], out: Path | None = None) -> ReportFiles:
    """Report on one run, or on several that differ by seed alone; finished or not.

    Goes to `out`, by default the folder "report" in the run or, for several runs, beside
    them. Files already there under the same names are replaced.
    """
    # matplotlib takes a second to load: commands that draw nothing need not wait for it.
    from gaugelasso.report.page import write_page
    from gaugelasso.report.profile import draw_profile
    from gaugelasso.report.training import draw_training

    runs = load_condition(folders)
    out = out or _home(folders) / "report"
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder {str(out)!r} for the report: {error}") from None
    files = ReportFiles(
        page=out / "index.html",
        profile=out / "profile.png",
        training=out / "training.png",
        tables=out / "tables.md",
    )
    draw_profile(runs, files.profile)
    draw_training(runs, files.training)
    write_page(runs, files.page, files.profile.read_bytes(), files.training.read_bytes())
    tables = [before_after(runs), *([runs_table(runs)] if len(runs) > 1 else [])]
    tables += [*(table for run in runs for table in run_tables(run)), events_table(runs)]
    files.tables.write_text("\n".join(map(to_markdown, tables)), encoding="utf-8")
    return files


def write_comparison(arms: Sequence[Condition], table: Table, out: Path) -> None:
    """Arms side by side in the existing folder `out`: arms.md, arms.png."""
    from gaugelasso.report.tradeoff import draw_tradeoff

    (out / "arms.md").write_text(to_markdown(table), encoding="utf-8")
    draw_tradeoff(arms, out / "arms.png")


def _home(folders: Sequence[Path]) -> Path:
    """The run itself, or the folder that all runs lie under."""
    if len(folders) == 1:
        return folders[0]
    return Path(os.path.commonpath([folder.absolute().parent for folder in folders]))


__all__ = ["ReportFiles", "write_comparison", "write_report"]
