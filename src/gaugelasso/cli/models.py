"""Commands that put one model to work: train it, then ask it."""

import logging
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from gaugelasso.cli.arguments import (
    Changes,
    ConfigPath,
    Device,
    Out,
    Overwrite,
    Resume,
    RunPath,
    choose_existing,
    load_settings,
    parse_changes,
)
from gaugelasso.cli.display import show_progress
from gaugelasso.cli.output import console, say
from gaugelasso.cli.show import show_divisions
from gaugelasso.config import changed, run_config
from gaugelasso.distributed import join
from gaugelasso.errors import UserError
from gaugelasso.models.decoding import sample
from gaugelasso.report.data import load_run
from gaugelasso.report.tables import print_outcome
from gaugelasso.runs.checkpoint import load_model
from gaugelasso.signals import stop_requests
from gaugelasso.tasks import TEST
from gaugelasso.tasks.text import readable
from gaugelasso.training.evaluation import choose_device, evaluate, whole_figures
from gaugelasso.training.trainer import Trainer


def train(
    config: ConfigPath,
    set_: Changes = None,
    out: Out = None,
    device: Device = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
) -> None:
    """Train and compress one model.

    Example: gaugelasso train configs/retrieval/demo.toml --out runs/demo --set train.seed=7
    """
    settings = load_settings(config, set_, device)
    folder = out or Path("runs") / f"{config.stem}-seed{settings.train.seed}"
    title = f"{settings.task_name}, seed {settings.train.seed}"
    existing, where = choose_existing(resume, overwrite), choose_device(settings.train.device)
    team = join(where.startswith("cuda"), settings.train.rank_timeout)
    if team.rank:  # rank 0 speaks for all
        logging.disable(logging.WARNING)
        _built(settings, folder, existing, team=team).run()
        team.close()
        return
    with show_progress(console, title, folder / "metrics.jsonl") as on_progress:
        trainer = _built(settings, folder, existing, on_progress, team)
        if resume:
            say(_start_message(folder, trainer.compressor.steps))
        trainer.run()
    team.close()
    print_outcome(load_run(folder), console)
    say(f"run folder: {folder}")


def _built(*arguments: Any, **named: Any) -> Trainer:
    """The trainer, which may be broken off like a crash: what was saved is as it was."""
    with (
        stop_requests() as request,
        request.interruptible("before it took a step; nothing was lost"),
    ):
        return Trainer(*arguments, **named)


def _start_message(folder: Path, step: int) -> str:
    """A name misspelt would else go unnoticed: where there is no run, one begins."""
    if step:
        return f"run folder {str(folder)!r}: going on after step {step:,}"
    return f"run folder {str(folder)!r}: no step saved there to go on from; beginning at step 0"


def eval_(
    run: RunPath,
    batches: Annotated[int, typer.Option(min=1, help="Held-out batches.")] = 64,
    whole: Annotated[
        bool, typer.Option("--whole", help="All of finite held-out data, not some batches.")
    ] = False,
    set_: Changes = None,
    device: Device = None,
) -> None:
    """Evaluate a run's model on its held-out stream.

    Example: gaugelasso eval runs/demo --batches 256

    Example: gaugelasso eval runs/books --whole --set task.valid=other.txt
    """
    settings = run_config(run)
    settings = changed(settings.to_dict(), parse_changes(set_))
    where = choose_device(device or "auto")
    model, task = load_model(run, where), settings.task
    if (task.length, task.inputs) != (model.initial_spec.length, model.initial_spec.inputs):
        raise UserError(f"{str(run)!r}: the model does not fit this task's length or inputs")
    if whole:
        figures, of = whole_figures(model, settings, where), "all held-out data"
    else:
        loss, metric = evaluate(model, settings, batches, where, stream=TEST)
        figures = {"loss": loss, task.metric_name: metric}
        of = f"{batches} batches of {settings.train.batch}"
    say("  ".join(f"{name} {value:.6f}" for name, value in figures.items()) + f"  ({of})")


def generate(
    run: RunPath,
    prompt: Annotated[str, typer.Option(help="Text to go on from.")] = "\n",
    length: Annotated[int, typer.Option(min=1, help="Bytes to write.")] = 400,
    temperature: Annotated[
        float, typer.Option(min=0, help="Below 1: likelier bytes; 0: the likeliest.")
    ] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Only this many bytes; 0: all.")] = 0,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of the draws.")] = 0,
    device: Device = None,
) -> None:
    """Let a language model go on from a prompt.

    Example: gaugelasso generate runs/books --prompt "It was a " --length 200
    """
    task = run_config(run).task_name
    if task != "charlm":
        raise UserError(f"{str(run)!r} learned {task!r}; text comes from runs of 'charlm' only")
    where = choose_device(device or "auto")
    model = load_model(run, where).eval()
    generator = torch.Generator(where).manual_seed(seed)
    # Bytes of the command line that are no UTF-8 stay what they are.
    start = prompt.encode(errors="surrogateescape")
    tokens = sample(model, start, temperature=temperature, top_k=top_k, generator=generator)
    for piece in readable(chain(start, islice(tokens, length))):
        typer.echo(piece, nl=False)
    typer.echo()


def show(
    run: RunPath,
    problems: Annotated[int, typer.Option(min=1, help="How many divisions.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the problems.")] = 0,
    device: Device = None,
) -> None:
    """Print divisions as the model of an ff31 run solves them, step by step.

    Example: gaugelasso show runs/division --problems 3
    """
    for line in show_divisions(run, problems, seed, choose_device(device or "auto")):
        say(line)
