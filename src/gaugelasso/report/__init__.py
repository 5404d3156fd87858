"""Reports: pictures, tables and an HTML page made from run folders.

Only the command line imports this package. It runs no model.
"""

import contextlib
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gaugelasso.errors import UserError
from gaugelasso.report.baseline import (
    baseline_of,
    baseline_table,
    load_baseline,
    sentences,
    trained_table,
)
from gaugelasso.report.compare import Comparison, compare_table
from gaugelasso.report.compare_results import compare_results
from gaugelasso.report.data import Condition, common_folder, load_condition, run_folders
from gaugelasso.report.event_table import events_table, exchange_table
from gaugelasso.report.layout import Table, to_markdown
from gaugelasso.report.methods import check_one_condition
from gaugelasso.report.results_schema import check_results
from gaugelasso.report.saturation import saturation_table, shares_table
from gaugelasso.report.tables import before_after, run_tables, runs_table
from gaugelasso.runs.writing import make_folder, write_bytes, write_json, write_text


@dataclass(frozen=True)
class ReportFiles:
    """Paths of the files of a report."""

    page: Path
    profile: Path
    training: Path
    saturation: Path | None
    tables: Path
    samples: Path | None
    baseline: Path | None = None


def write_report(folders: Sequence[Path], out: Path | None = None) -> ReportFiles:
    """Report on one run, or on several that differ only in their seed; finished or not.

    A folder that contains runs, as a sweep writes it, stands for these runs. The report goes to
    `out`; the default is the folder "report" in the run or, for several runs, in their common
    parent. Existing files of the same names are replaced.
    """
    # matplotlib takes a second to import, and most commands do not draw.
    from gaugelasso.report.axes_profile import draw_axes_profile
    from gaugelasso.report.heatmap import draw_saturation
    from gaugelasso.report.page import write_page
    from gaugelasso.report.profile import draw_profile
    from gaugelasso.report.samples import draw_samples
    from gaugelasso.report.training import draw_training
    from gaugelasso.report.worth import draw_baseline

    runs = load_condition(run_folders(folders))
    check_one_condition(runs)
    own = bool(runs[0].own_model)
    worth = baseline_of(runs[0]) if len(runs) == 1 else None
    with _output_folder(out or common_folder(folders) / "report") as out:
        files = ReportFiles(
            page=out / "index.html",
            profile=out / "profile.png",
            training=out / "training.png",
            saturation=None if own else out / "saturation.png",
            tables=out / "tables.md",
            samples=out / "samples.png" if runs[0].samples() else None,
            baseline=out / "baseline.png" if worth else None,
        )
        (draw_axes_profile if own else draw_profile)(runs, files.profile)
        draw_training(runs, files.training)
        if files.saturation:
            draw_saturation(runs, files.saturation)
        if files.samples:
            draw_samples(runs[0], files.samples)
        if worth and files.baseline:
            draw_baseline(worth, files.baseline)
        write_page(
            runs,
            files.page,
            profile=files.profile.read_bytes(),
            saturation=files.saturation.read_bytes() if files.saturation else None,
            samples=files.samples.read_bytes() if files.samples else None,
            baseline=(worth, files.baseline.read_bytes()) if worth and files.baseline else None,
        )
        tables = [before_after(runs), *([runs_table(runs)] if len(runs) > 1 else [])]
        tables += [baseline_table(worth), trained_table(worth)] if worth else []
        tables += [saturation_table(runs), *([] if own else [shares_table(runs)])]
        tables += [*(table for run in runs for table in run_tables(run)), events_table(runs)]
        tables += [exchanges] if (exchanges := exchange_table(runs)) else []
        write_text(files.tables, "\n".join(map(to_markdown, tables)))
    return files


def write_baseline(path: Path) -> tuple[Path, Path]:
    """Write the picture and the tables of a baseline.json beside it; returns their paths."""
    from gaugelasso.report.worth import draw_baseline

    data = load_baseline(path)
    with _output_folder(path.parent) as out:
        draw_baseline(data, picture := out / "baseline.png")
        tables = map(to_markdown, (baseline_table(data), trained_table(data)))
        write_text(text := out / "baseline.md", "\n".join([*sentences(data), "", *tables]))
    return picture, text


def write_comparison(arms: Sequence[Condition], table: Table, out: Path) -> None:
    """Write the comparison of arms into the folder `out`: arms.md, arms.png."""
    from gaugelasso.report.tradeoff import draw_tradeoff

    with _output_folder(out):
        write_text(out / "arms.md", to_markdown(table))
        draw_tradeoff(arms, out / "arms.png")


def write_pareto(paths: Sequence[Path], out: Path | None = None) -> tuple[Path, Path]:
    """Loss against work over finished runs of one task; returns the picture and the table.

    They go to `out`; the default is the folder "pareto" in the common parent of the runs.
    """
    from gaugelasso.report.pareto import draw_pareto, load_points, pareto_table

    points = load_points(paths)
    with _output_folder(out or common_folder(paths) / "pareto") as out:
        draw_pareto(points, picture := out / "pareto.png")
        write_text(table := out / "pareto.md", to_markdown(pareto_table(points)))
    return picture, table


def write_methods(found: Comparison, out: Path, results: Path | None = None) -> dict[str, Path]:
    """Write a comparison of methods into `out`: compare.md, compare.png, compare.json.

    `results` is another place for the JSON, which must fit it: UserError if `make tables` would
    not read it there. Everything is made before the first file is written.
    """
    from gaugelasso.report.compare_figure import draw_comparison

    picture = io.BytesIO()
    draw_comparison(found, picture)
    table, data = to_markdown(compare_table(found)), compare_results(found)
    if results is not None:
        check_results(results, data)
        make_folder(results.parent)
    files = {"picture": out / "compare.png", "table": out / "compare.md"}
    files |= {"results": out / "compare.json"}
    with _output_folder(out):
        write_bytes(files["picture"], picture.getvalue())
        write_text(files["table"], table)
        for path in dict.fromkeys([files["results"], *([results] if results else [])]):
            write_json(path, data)
    return files


@contextlib.contextmanager
def _output_folder(out: Path) -> Iterator[Path]:
    """Creates the folder if it is missing; a file that cannot be written becomes a UserError."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"the folder {str(out)!r} for the report cannot be created: {error}"
        ) from None
    try:
        yield out
    except OSError as error:
        name, why = str(error.filename or out), error.strerror or error
        raise UserError(f"output {name!r} cannot be written: {why}") from None


__all__ = [
    "ReportFiles",
    "common_folder",
    "write_baseline",
    "write_comparison",
    "write_methods",
    "write_pareto",
    "write_report",
]
