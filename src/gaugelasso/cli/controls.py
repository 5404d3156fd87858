"""Commands that train what a run is compared with: retrain, prune, cofi."""

from pathlib import Path
from typing import Annotated

import typer

from gaugelasso.baselines.cofi import MASK_RATE, CofiPlan
from gaugelasso.baselines.cofi_run import CofiTrainer, cofi_settings
from gaugelasso.baselines.folder import CONFIG, STRUCTURE, opened
from gaugelasso.baselines.post_hoc import PrunePlan
from gaugelasso.baselines.pruning import PruneTrainer, prune_settings
from gaugelasso.baselines.retrained import found_structure, from_scratch
from gaugelasso.baselines.setting import plain_settings
from gaugelasso.baselines.source import Source
from gaugelasso.cli.arguments import (
    Changes,
    Device,
    Out,
    Overwrite,
    Resume,
    RunPath,
    choose_existing,
    parse_changes,
)
from gaugelasso.cli.display import show_progress
from gaugelasso.cli.output import console, print_line
from gaugelasso.config import run_config
from gaugelasso.errors import UserError
from gaugelasso.report.data import check_finished, load_run
from gaugelasso.report.results import collect_results, results_table
from gaugelasso.report.tables import print_outcome
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

    Steps, data and schedule are those of the run. Each seed is a run folder below the output
    folder, which is "retrained" in RUN by default. The same command goes on after an interruption.

    Example: gaugelasso retrain runs/demo --seeds 42-44

    Example: gaugelasso retrain runs/main/seed45 --seeds 42-46 --jobs 5 --out runs/scratch
    """
    loaded = load_run(run)
    check_finished([loaded])
    summary = loaded.summary or {}
    changes = parse_changes(set_, device)
    settings = plain_settings(run, summary, changes, "retrain")
    numbers = [settings.train.seed] if seeds is None else parse_seeds(seeds)
    where = choose_device(settings.train.device)
    folder = out or run / "retrained"
    text = comment("a found structure, trained from scratch") + "\n" + to_toml(settings.to_dict())
    with opened(folder, run, text, found_structure(run, summary), "retrained runs"):
        arm = from_scratch("", folder / STRUCTURE, folder)
        plan = Plan(
            folder / CONFIG, numbers, [arm], jobs, device=device, existing="resume",
            on_gpu=where.startswith("cuda"), to_go_on="run the command again",
        )  # fmt: skip
        if failed := failures_message(outcomes := run_sweep(plan, console), len(numbers)):
            raise UserError(f"{failed}; their logs are beside their folders")
        results = collect_results(outcomes[0].folders)
        write_json(folder / "results.json", results)
    print_line(results_table(results, f"from scratch, the structure of {_name(run)}"))
    print_line(f"run folders: {folder}")


def _name(run: Path) -> str:
    return run.absolute().name


def prune(
    run: RunPath,
    fma: Annotated[
        float | None,
        typer.Option(help="Prune to this work per token, by the accounting of the run."),
    ] = None,
    loss: Annotated[
        float | None,
        typer.Option(help="Prune until the loss on selection data would exceed this one."),
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=1, help="With --fma: rounds, each to an interpolated work.")
    ] = 10,
    channels: Annotated[
        int, typer.Option(min=1, help="With --loss: channels that a round removes.")
    ] = 1,
    corrective: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Steps at train.lr_min after each round.",
            show_default="100 with --fma, 10 with --loss",
        ),
    ] = None,
    finetune: Annotated[
        int | None,
        typer.Option(
            min=1, help="Steps after the last round.", show_default="train.cooldown of the run"
        ),
    ] = None,
    set_: Changes = None,
    out: Out = None,
    device: Device = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
) -> None:
    """Prune a trained model after its training: post-hoc pruning by the paper's protocol.

    RUN is a finished run of a full model, trained without pressure, such as the folder
    "reference" of a run with target.above_full. Each round balances the model, removes the least
    efficient channels and takes corrective steps; fine-tuning follows. The default output folder
    is "pruned" in RUN.

    Example: gaugelasso prune runs/full --fma 200000 --out runs/pruned

    Example: gaugelasso prune runs/full --loss 0.1 --corrective 10 --finetune 10000
    """
    _check_one_of(fma, "loss", loss)
    if fma is not None and not 0 < fma < float("inf"):
        raise UserError(f"--fma {fma:g}: must be a finite number above 0")
    source = _source(run)
    steps = finetune or _cooldown(run)
    plan = PrunePlan(loss, fma, rounds, channels, corrective or (10 if fma is None else 100), steps)
    changes = parse_changes(set_, device)
    settings, folder = prune_settings(source, plan, changes), out or run / "pruned"
    existing = choose_existing(resume, overwrite)
    with show_progress(console, "post-hoc pruning", folder / "metrics.jsonl") as on_progress:
        PruneTrainer(source, plan, settings, folder, existing, on_progress).run()
    _print_end(folder)


def cofi(
    run: RunPath,
    fma: Annotated[
        float | None,
        typer.Option(help="The work per token to reach, by the accounting of the run."),
    ] = None,
    parameters: Annotated[
        float | None,
        typer.Option(help="The number of parameters to reach, without the embedding."),
    ] = None,
    warmup: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Steps in which the target falls to the requested one.",
            show_default="1/14 of the steps of the run",
        ),
    ] = None,
    prune: Annotated[
        int | None,
        typer.Option(
            min=1, help="Steps of pruning at the target.", show_default="8/14 of the run's steps"
        ),
    ] = None,
    finetune: Annotated[
        int | None,
        typer.Option(
            min=1, help="Steps of the dense model.", show_default="5/14 of the run's steps"
        ),
    ] = None,
    distill: Annotated[
        float, typer.Option(help="Share of the distance to the full model in the loss.")
    ] = 0.5,
    mask_rate: Annotated[
        float, typer.Option(help="Learning rate of the masks and of their multipliers.")
    ] = MASK_RATE,
    set_: Changes = None,
    out: Out = None,
    device: Device = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
) -> None:
    """Compress a trained model with the masks of CoFi while it learns from itself.

    RUN is a finished run of a full model, trained without pressure: the start of the student and
    its teacher. Hard-concrete masks of attention blocks, heads, residual sites, MLP blocks and
    intermediate units are held to the target by a Lagrangian, made dense, and the model is
    fine-tuned. The default output folder is "cofi" in RUN.

    Example: gaugelasso cofi runs/full --fma 200000 --out runs/cofi

    Example: gaugelasso cofi runs/full --parameters 5e6 --warmup 5000 --prune 40000 --finetune 25000
    """
    _check_one_of(fma, "parameters", parameters)
    for name, value, most in (("distill", distill, 1.0), ("mask-rate", mask_rate, 10.0)):
        if not 0 <= value <= most:
            raise UserError(f"--{name} {value:g}: must be a number from 0 to {most:g}")
    source = _source(run)
    steps = int(source.summary["steps"])
    plan = CofiPlan(
        "parameters" if fma is None else "fma", fma or parameters or 0.0, warmup or steps // 14,
        prune or 8 * steps // 14, finetune or 5 * steps // 14, distill, mask_rate,
    )  # fmt: skip
    changes = parse_changes(set_, device)
    settings, folder = cofi_settings(source, plan, changes), out or run / "cofi"
    existing = choose_existing(resume, overwrite)
    with show_progress(console, "CoFi", folder / "metrics.jsonl") as on_progress:
        CofiTrainer(source, plan, settings, folder, existing, on_progress).run()
    _print_end(folder)


def _check_one_of(fma: float | None, other: str, value: float | None) -> None:
    if (fma is None) == (value is None):
        given = "both are given" if fma is not None else "none is given"
        raise UserError(f"--fma and --{other}: give one of them; {given}")


def _source(run: Path) -> Source:
    """The finished run that a method begins with."""
    check_finished([load_run(run)])
    source = Source.of(run)
    if not source.is_full:
        print_line(f"note: {str(run)!r} is compressed already; the method begins there")
    return source


def _cooldown(run: Path) -> int:
    if not (steps := run_config(run).train.cooldown):
        raise UserError("--finetune: the run has train.cooldown = 0; give a number of steps")
    return steps


def _print_end(folder: Path) -> None:
    print_outcome(load_run(folder), console)
    print_line(f"run folder: {folder}")
