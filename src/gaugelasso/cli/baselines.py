"""The command baseline: what a run is worth against plain training of uniform models."""

import math
from typing import Annotated, Any, Literal

import typer

from gaugelasso.baselines.folder import BASELINE, CONFIG, RESULTS, STRUCTURE, opened
from gaugelasso.baselines.ladder import Scale
from gaugelasso.baselines.result import add_latencies_, collect
from gaugelasso.baselines.retrained import found_structure
from gaugelasso.baselines.search import Search
from gaugelasso.baselines.setting import Bar, loss_of, uniform_settings
from gaugelasso.cli.arguments import Changes, Device, Out, RunPath, parse_changes
from gaugelasso.cli.output import console, print_line
from gaugelasso.errors import UserError
from gaugelasso.report import write_baseline
from gaugelasso.report.baseline import baseline_table, load_baseline, sentences, trained_table
from gaugelasso.report.data import check_finished, load_run
from gaugelasso.report.formats import count, figure, known
from gaugelasso.report.layout import render, to_markdown
from gaugelasso.report.toml import comment, to_toml
from gaugelasso.runs.writing import write_json
from gaugelasso.sweeps.sweep import Plan
from gaugelasso.training.evaluation import choose_device

_SCALES: dict[str, tuple[Scale, ...]] = {
    "dims": ("dims",),
    "heads": ("heads",),
    "both": ("dims", "heads"),
}


def baseline(
    run: RunPath,
    seeds: Annotated[
        int, typer.Option(min=1, help="Number of seeds of every model, from the run's seed on.")
    ] = 1,
    jobs: Annotated[int, typer.Option(min=1, help="Number of runs at the same time.")] = 1,
    scale: Annotated[
        Literal["dims", "heads", "both"],
        typer.Option(
            help="What narrows with the width and d_f: dims, the sizes d_k and d_v of all heads; "
            "heads, their number; both: search both ways and take the smaller model."
        ),
    ] = "both",
    tolerance: Annotated[
        float, typer.Option(min=0, help="Share of the run's loss that a model may be above it.")
    ] = 0.0,
    set_: Changes = None,
    out: Out = None,
    device: Device = None,
    repeats: Annotated[int, typer.Option(min=3, help="Timed repetitions of the latency.")] = 30,
) -> None:
    """Find the smallest uniform model that reaches a run's loss, by training without pressure.

    Also trains the run's structure from scratch. All models have the steps, data and schedule of
    the run. The same command goes on after an interruption. The default output folder is
    "baseline" in RUN.

    Example: gaugelasso baseline runs/demo

    Example: gaugelasso baseline runs/main/seed42 --seeds 3 --jobs 6 --set compress.lr=2e-3
    """
    if not math.isfinite(tolerance):
        raise UserError(f"--tolerance {tolerance}: must be a finite number")
    loaded = load_run(run)
    check_finished([loaded])
    summary = loaded.summary or {}
    bar = Bar(loss_of(run, summary), tolerance)
    changes = parse_changes(set_, device)
    settings = uniform_settings(run, summary, changes)
    where = choose_device(settings.train.device)
    folder = out or run / "baseline"
    text = comment("plain training with the schedule of a run") + "\n" + to_toml(settings.to_dict())
    with opened(folder, run, text, found_structure(run, summary), BASELINE):
        numbers = range(settings.train.seed, settings.train.seed + seeds)
        plan = Plan(
            folder / CONFIG, numbers, [], jobs, device=device, existing="resume",
            on_gpu=where.startswith("cuda"), to_go_on="run the command again",
        )  # fmt: skip
        print_line(f"loss to reach on selection data: {figure(bar.limit)}")
        search = Search(settings, folder, folder / STRUCTURE, _SCALES[scale], bar, plan)
        found = search.run(console, _print_row)
        how = {"scale": scale, "changes": set_ or []}
        result = collect(run, settings, bar, numbers, found, how)
        add_latencies_(result, settings, where, repeats)
        write_json(path := folder / RESULTS[BASELINE], result)
        picture, tables = write_baseline(path)
    data = load_baseline(path)
    for table in (trained_table(data), baseline_table(data)):
        if console.is_terminal:
            render(table, console)
        else:  # a log file has no width to fit a table to
            print_line(to_markdown(table))
    for line in sentences(data):
        print_line(line)
    print_line(f"baseline: {path}, {tables}, {picture}")


def _print_row(row: dict[str, Any]) -> None:
    verb = "reached" if row["held"] else "missed"
    loss = known(row["selection_loss"], figure)
    print_line(f"{row['name']}: {count(row['fma'])} FMA, selection loss {loss}, {verb} the loss")
