"""The command that trains the structure of a run from scratch: retrain."""

from pathlib import Path
from typing import Annotated

import typer

from gaugelasso.baselines.folder import CONFIG, RESULTS, RETRAINED, STRUCTURE, opened
from gaugelasso.baselines.retrained import found_structure, from_scratch
from gaugelasso.baselines.setting import plain_settings
from gaugelasso.cli.arguments import Changes, Device, Out, RunPath, parse_changes
from gaugelasso.cli.output import console, print_line
from gaugelasso.errors import UserError
from gaugelasso.report.data import check_finished, load_run
from gaugelasso.report.results import collect_results, results_table
from gaugelasso.report.toml import comment, to_toml
from gaugelasso.runs.writing import write_json
from gaugelasso.sweeps.arms import failures_message, parse_seeds
from gaugelasso.sweeps.sweep import Plan, run_sweep
from gaugelasso.training.evaluation import choose_device


def retrain(
    run: RunPath,
    seeds: Annotated[
        str | None,
        typer.Option(help="Seeds, e.g. 42-46 or 1,5,9.", show_default="the seed of the run"),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Number of runs at the same time.")] = 1,
    set_: Changes = None,
    out: Out = None,
    device: Device = None,
) -> None:
    """Train the structure that a run found from scratch: new weights and no pressure.

    Steps, data and schedule are those of the run, and of the full model if the run began with one
    (prune, cofi, torch-pruning). Each seed is a run folder below the output
    folder, which is "retrained" in RUN by default. The same command goes on after an interruption.

    Example: gaugelasso retrain runs/demo --seeds 42-44

    Example: gaugelasso retrain runs/main/seed45 --seeds 42-46 --jobs 5 --out runs/scratch
    """
    loaded = load_run(run)
    check_finished([loaded])
    summary = loaded.summary or {}
    changes = parse_changes(set_, device)
    # The structure of the run stands in for the whole section [model].
    settings = plain_settings(run, summary, changes, "retrain", ("task", "target", "model"))
    numbers = [settings.train.seed] if seeds is None else parse_seeds(seeds)
    where = choose_device(settings.train.device)
    folder = out or run / "retrained"
    text = comment("a found structure, trained from scratch") + "\n" + to_toml(settings.to_dict())
    with opened(folder, run, text, found_structure(run, summary), RETRAINED):
        arm = from_scratch("", folder / STRUCTURE, folder)
        plan = Plan(
            folder / CONFIG, numbers, [arm], jobs, device=device, existing="resume",
            on_gpu=where.startswith("cuda"), to_go_on="run the command again",
        )  # fmt: skip
        if failed := failures_message(outcomes := run_sweep(plan, console), len(numbers)):
            raise UserError(f"{failed}; their logs are beside their folders")
        results = collect_results(outcomes[0].folders)
        write_json(folder / RESULTS[RETRAINED], results)
    print_line(results_table(results, f"from scratch, the structure of {_name(run)}"))
    print_line(f"run folders: {folder}")


def _name(run: Path) -> str:
    return run.absolute().name
