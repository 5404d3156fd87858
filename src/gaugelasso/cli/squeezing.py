"""The command squeeze: smaller models from the structure of a run, at the same loss."""

import math
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from gaugelasso.baselines.folder import CONFIG, RESULTS, SQUEEZED, opened
from gaugelasso.baselines.retrained import found_structure
from gaugelasso.baselines.setting import Bar, loss_of
from gaugelasso.baselines.squeeze import Goal, Row, Squeeze, squeeze_settings
from gaugelasso.cli.arguments import Changes, Device, Out, RunPath, parse_changes
from gaugelasso.cli.output import console, print_line
from gaugelasso.compress.courses.metric_target import MetricTarget
from gaugelasso.config import Config
from gaugelasso.errors import UserError
from gaugelasso.report.data import check_finished, load_run
from gaugelasso.report.formats import figure
from gaugelasso.report.squeeze import squeeze_sentence, squeeze_table, try_sentence
from gaugelasso.report.toml import comment, to_toml
from gaugelasso.runs.checkpoint import required
from gaugelasso.runs.environment import environment
from gaugelasso.runs.reading import exists, read_json
from gaugelasso.runs.writing import write_json
from gaugelasso.sweeps.sweep import Plan
from gaugelasso.training.evaluation import choose_device

RESULT = RESULTS[SQUEEZED]


def squeeze(
    run: RunPath,
    rounds: Annotated[
        int, typer.Option(min=1, help="Most rounds; each tries works that fall by the step.")
    ] = 6,
    step: Annotated[
        float, typer.Option(help="Share of the work that a try keeps: above 0 and below 0.9.")
    ] = 0.7,
    loss: Annotated[
        float | None,
        typer.Option(help="Loss to keep on selection data.", show_default="that of the run"),
    ] = None,
    seeds: Annotated[
        int, typer.Option(min=1, help="Seeds of each work, from the run's on; one must keep it.")
    ] = 1,
    jobs: Annotated[int, typer.Option(min=1, help="Number of runs at the same time.")] = 1,
    set_: Changes = None,
    out: Out = None,
    device: Device = None,
) -> None:
    """Train smaller models from the structure of a run, as long as they keep its loss.

    Each try begins with the smallest structure that has the loss so far and with new weights, and
    has the steps and data of the run. A round tries one work for each job, or for each `--seeds`
    jobs. The same command goes on after an interruption. The default output folder is "squeezed" in
    RUN.

    Example: gaugelasso squeeze runs/demo

    Example: gaugelasso squeeze runs/main/seed42 --loss 0.002 --jobs 3 --out runs/small
    """
    if not 0 < step < 0.9:
        raise UserError(f"--step {step:g}: must be above 0 and below 0.9")
    if loss is not None and not math.isfinite(loss):
        raise UserError(f"--loss {loss}: must be a finite number")
    loaded = load_run(run)
    check_finished([loaded])
    summary = loaded.summary or {}
    changes = parse_changes(set_, device)
    settings = squeeze_settings(run, summary, changes)
    named = loaded.metric_target
    metric = None if named is None else MetricTarget(named, loaded.metric_lower_is_better)
    goal = Goal(Bar(loss_of(run, summary, "squeeze") if loss is None else loss), metric)
    where = choose_device(settings.train.device)
    folder = out or run / "squeezed"
    about = comment("smaller models from the structure of a run")
    text = f"{about}\n{to_toml(settings.to_dict())}"
    numbers = range(settings.train.seed, settings.train.seed + seeds)
    plan = Plan(
        folder / CONFIG, numbers, [], jobs, device=device, existing="resume",
        on_gpu=where.startswith("cuda"), to_go_on="run the command again",
    )  # fmt: skip
    search = Squeeze(run, settings, folder, goal, plan, step)
    required(run)  # raises if the weights are lost, before anything is written
    result = partial(_result, run, settings, search)
    with opened(folder, run, text, found_structure(run, summary), SQUEEZED):
        tries = _known_tries(folder / RESULT, search)
        print_line(f"loss to keep on selection data: {figure(goal.bar.limit)}")

        def on_round(rows: list[Row], best: Row) -> None:
            for row in rows:
                print_line(try_sentence(row, settings.compress.accounting))
            if len(search.rows) >= tries:  # else those of an earlier command are not all counted
                write_json(folder / RESULT, result(best, where))

        if not exists(folder / RESULT):  # what the first tries were made with
            write_json(folder / RESULT, result(search.first, where))
        best = search.run(rounds, console, on_round, tries)
        write_json(path := folder / RESULT, found := result(best, where))
    print_line(squeeze_table(found))
    print_line(squeeze_sentence(found))
    print_line(f"squeeze: {path}")


def _known_tries(path: Path, search: Squeeze) -> int:
    """How many tries a folder has; UserError if they are of other options, and would not count."""
    before = read_json(path) if exists(path) else {}
    if not isinstance(before, dict):
        raise UserError(f"{str(path)!r}: not what squeeze writes; choose another --out")
    for option, (key, now) in _search_options(search).items():
        old = before.get(key, now)  # early versions wrote the limit alone
        if old != now:
            raise UserError(
                f"{option}: the tries in {str(path.parent)!r} have {key} = {old!r}, and now it is "
                f"{now!r}; give the same options, or choose another --out"
            )
    return max(0, len(before.get("rows", [])) - 1)  # the first row is that of the run


def _search_options(search: Squeeze) -> dict[str, tuple[str, Any]]:
    """Option -> (key of the result, value), of those that decide what is tried and what counts."""
    return {
        "--loss": ("limit", search.goal.bar.limit),
        "--step": ("step", search.step),
        "--seeds": ("seeds", len(search.plan.seeds)),
        "--jobs": ("at_once", search.at_once),
    }


def _result(run: Path, config: Config, search: Squeeze, best: Row, where: str) -> dict[str, Any]:
    origin = environment(where)
    return {
        "run": str(run),
        "task": config.task_name,
        "metric": config.task.metric_name,
        "accounting": config.compress.accounting,
        **dict(_search_options(search).values()),
        "smallest": best["folder"],
        **{key: sum(row[key] or 0.0 for row in search.rows) for key in ("training_fma", "wall_s")},
        "rows": [search.first, *search.rows],
        **{key: origin[key] for key in ("command", "commit", "hardware", "date")},
    }
