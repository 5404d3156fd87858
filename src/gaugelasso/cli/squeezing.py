"""The command squeeze: smaller models from the structure of a run, at the same loss."""

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from gaugelasso.baselines.folder import CONFIG, opened
from gaugelasso.baselines.retrained import found_structure
from gaugelasso.baselines.setting import Bar, loss_of
from gaugelasso.baselines.squeeze import Goal, Row, Squeeze, squeeze_settings
from gaugelasso.cli.arguments import Changes, Device, Out, RunPath, parse_changes
from gaugelasso.cli.output import console, print_line
from gaugelasso.errors import UserError
from gaugelasso.report.data import check_finished, load_run
from gaugelasso.report.formats import figure, known
from gaugelasso.report.squeeze import squeeze_sentence, squeeze_table
from gaugelasso.report.toml import comment, to_toml
from gaugelasso.runs.environment import environment
from gaugelasso.runs.units import amount
from gaugelasso.runs.writing import write_json
from gaugelasso.sweeps.sweep import Plan
from gaugelasso.training.evaluation import choose_device

RESULT = "squeeze.json"


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
    jobs. The same command goes on after an interruption. The default
    output folder is "squeezed" in RUN.

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
    goal = Goal(
        Bar(loss_of(run, summary, "squeeze") if loss is None else loss),
        loaded.metric_target, loaded.metric_lower_is_better,
    )  # fmt: skip
    where = choose_device(settings.train.device)
    folder = out or run / "squeezed"
    about = comment("smaller models from the structure of a run")
    text = f"{about}\n{to_toml(settings.to_dict())}"
    with opened(folder, run, text, found_structure(run, summary), "squeezed runs"):
        numbers = range(settings.train.seed, settings.train.seed + seeds)
        plan = Plan(
            folder / CONFIG, numbers, [], jobs, device=device, existing="resume",
            on_gpu=where.startswith("cuda"), to_go_on="run the command again",
        )  # fmt: skip
        print_line(f"loss to keep on selection data: {figure(goal.bar.limit)}")
        counted = settings.compress.accounting

        def print_row(row: Row) -> None:
            verb = "keeps" if row["held"] else "misses"
            selection = known(row["selection_loss"], figure)
            print_line(f"{amount(row['work'], counted)}: {selection} {verb} the loss")

        search = Squeeze(run, settings, folder, goal, plan, step)
        best = search.run(rounds, console, print_row)
        result = _result(run, settings.task_name, counted, search, best)
        result |= {"metric": settings.task.metric_name, "limit": goal.bar.limit}
        write_json(path := folder / RESULT, {**result, **_origin(where)})
    print_line(squeeze_table(result))
    print_line(squeeze_sentence(result))
    print_line(f"squeeze: {path}")


def _result(run: Path, task: str, counted: str, search: Squeeze, best: Row) -> dict[str, Any]:
    return {
        "run": str(run),
        "task": task,
        "accounting": counted,
        "smallest": best["folder"],
        "training_fma": sum(row["training_fma"] for row in search.rows),
        "wall_s": sum(row["wall_s"] for row in search.rows),
        "rows": [search.first, *search.rows],
    }


def _origin(where: str) -> dict[str, Any]:
    found = environment(where)
    return {key: found[key] for key in ("command", "commit", "hardware", "date")}
