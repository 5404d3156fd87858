"""The command line. Parses, calls, prints; errors that are the user's to mend exit with 2."""

import os
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from gaugelasso import checkpoint
from gaugelasso.bench import bench_run, bench_step, default_file, record
from gaugelasso.checkpoint import load_spec
from gaugelasso.config import Config, load_config
from gaugelasso.display import show_progress
from gaugelasso.errors import UserError
from gaugelasso.evaluation import choose_device, evaluate, final_figures
from gaugelasso.report import write_report
from gaugelasso.report.data import load_run
from gaugelasso.report.results import collect_results, results_table
from gaugelasso.report.tables import print_outcome, print_structure
from gaugelasso.report.timing import print_bench
from gaugelasso.runs import Existing, RunFolder, make_folder, read_json, write_json
from gaugelasso.show import show_divisions
from gaugelasso.sweep import parse_seeds, run_sweep
from gaugelasso.trainer import Trainer
from gaugelasso.version import __version__

app = typer.Typer(
    name="gaugelasso",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Shrink a transformer while it trains: name the loss you need, keep the smallest "
    "dense network that holds it.",
)
console = Console()


def say(text: str) -> None:
    """A plain line: names that users chose may look like markup."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML file.")]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a key, e.g. train.steps=2000."),
]
Device = Annotated[str | None, typer.Option(help="auto, cpu or cuda.")]
Out = Annotated[Path | None, typer.Option(help="Output folder.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with an existing run folder.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing run folder.")]


def _print_version(asked: bool) -> None:
    if asked:
        console.print(__version__, highlight=False)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    pass


@app.command()
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
    settings = _load(config, set_, device)
    folder = out or Path("runs") / f"{config.stem}-seed{settings.train.seed}"
    title = f"{settings.task_name}, seed {settings.train.seed}"
    with show_progress(console, title) as on_progress:
        trainer = Trainer(settings, folder, _existing(resume, overwrite), on_progress)
        trainer.run()
    print_outcome(load_run(folder), console)
    say(f"run folder: {folder}")


@app.command(name="eval")
def eval_(
    run: RunPath,
    batches: Annotated[int, typer.Option(min=1, help="Held-out batches.")] = 64,
    device: Device = None,
) -> None:
    """Evaluate a run's model on its held-out stream.

    Example: gaugelasso eval runs/demo --batches 256
    """
    settings = Config.from_dict(read_json(run / "config.json"))
    where = choose_device(device or "auto")
    model = checkpoint.load_model(run, where)
    loss, metric = evaluate(model, settings, batches, where)
    say(
        f"loss {loss:.6f}  {settings.task.metric_name} {metric:.6f}  ({batches} batches of "
        f"{settings.train.batch})"
    )
    for name, value in final_figures(model, settings, batches, where).items():
        say(f"{name} {value:.6f}")


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders.")],
    out: Out = None,
) -> None:
    """Draw what happened: profile, curves, and a one-page HTML report.

    Example: gaugelasso report runs/demo
    """
    files = write_report(runs, out)
    for name, path in (
        ("structural profile", files.profile),
        ("training curves", files.training),
        ("report", files.page),
    ):
        say(f"{name}: {path}")


@app.command()
def info(run: RunPath) -> None:
    """Print the structure of a run's model, layer by layer.

    Example: gaugelasso info runs/demo
    """
    loaded = load_run(run)
    print_structure(loaded, console)
    print_outcome(loaded, console)


@app.command()
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


@app.command()
def sweep(
    config: ConfigPath,
    seeds: Annotated[str, typer.Option(help="Seeds, as in 42-46 or 1,5,9.")] = "42-46",
    jobs: Annotated[int, typer.Option(min=1, help="Runs side by side.")] = 1,
    set_: Changes = None,
    out: Out = None,
    device: Device = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    results: Annotated[
        Path | None, typer.Option(help="Also write the results file (JSON) here.")
    ] = None,
) -> None:
    """Train several seeds, processes side by side; one failure does not stop the rest.

    Example: gaugelasso sweep configs/retrieval/main.toml --seeds 42-46 --jobs 5
    """
    numbers = parse_seeds(seeds)
    settings = _load(config, set_, device)
    folder = out or Path("runs") / config.stem
    arguments = [part for change in set_ or [] for part in ("--set", change)]
    arguments += ["--device", device] if device else []
    arguments += ["--resume"] if resume else []
    arguments += ["--overwrite"] if overwrite else []
    if _existing(resume, overwrite) == "refuse":
        # Before any run starts: a log of an earlier run must not be touched either.
        for seed in numbers:
            RunFolder.check_free(folder / f"seed{seed}")
    if results is not None:
        make_folder(results.parent)
    on_gpu = choose_device(settings.train.device).startswith("cuda")
    outcome = run_sweep(config, numbers, folder, jobs, arguments, console, on_gpu)
    if outcome.ended:
        collected = collect_results(outcome.ended)
        # The sweep's own command, not the one of its last run.
        collected["command"] = " ".join(["gaugelasso", *sys.argv[1:]])
        for path in filter(None, (folder / "results.json", results)):
            write_json(path, collected)
        say(results_table(collected, config.stem))
        files = write_report(outcome.ended, folder / "report")
        say(f"report: {files.page}")
    if outcome.failed:
        seeds_said = ", ".join(map(str, outcome.failed))
        raise UserError(f"{len(outcome.failed)} of {len(numbers)} runs failed: seeds {seeds_said}")


@app.command()
def bench(
    what: Annotated[
        Path, typer.Argument(metavar="CONFIG|RUN", help="A TOML file, or a run for --inference.")
    ],
    inference: Annotated[
        bool, typer.Option("--inference", help="Serve a run's model, its ancestor, and a uniform.")
    ] = False,
    structure: Annotated[
        Path | None,
        typer.Option(metavar="RUN|JSON", help="Time this structure instead of the full one."),
    ] = None,
    work: Annotated[str | None, typer.Option(help="Name of the row; default from CONFIG.")] = None,
    repeats: Annotated[int, typer.Option(min=3, help="Timed repetitions.")] = 30,
    set_: Changes = None,
    device: Device = None,
    out: Annotated[
        Path | None, typer.Option(help="Benchmark file; default benchmarks/HARDWARE_DATE.json.")
    ] = None,
) -> None:
    """Time a training step part by part, or what a compressed model gains when served.

    Example: gaugelasso bench configs/retrieval/main.toml --structure runs/main/seed42

    Example: gaugelasso bench runs/demo --inference
    """
    if inference:
        if structure or set_:
            raise UserError("--inference takes structure and settings from RUN: leave out "
                            "--structure and --set")  # fmt: skip
        settings = Config.from_dict(read_json(what / "config.json"))
        where = choose_device(device or "auto")
        rows = bench_run(what, work or what.name, settings, where, repeats)
    else:
        settings = _load(what, set_, device)
        where = choose_device(settings.train.device)
        spec = load_spec(structure) if structure else settings.model.spec(settings.task)
        name = work or what.stem + ("-structure" if structure else "")
        rows = {name: bench_step(settings, spec, where, repeats)}
    path = out or default_file(where)
    for row_name, row in rows.items():
        record(path, where, "inference" if inference else "rows", {"work": row_name, **row})
    print_bench(rows, console)
    say(f"benchmark file: {path}")


def _load(path: Path, changes: list[str] | None, device: str | None) -> Config:
    pairs: dict[str, str] = {}
    for change in changes or []:
        key, equals, value = change.partition("=")
        if not equals:
            raise UserError(f"--set {change!r}: write it as key=value, e.g. train.steps=2000")
        pairs[key.strip()] = value.strip()
    if device is not None:
        pairs["train.device"] = device
    settings = load_config(path, pairs)
    choose_device(settings.train.device)
    return settings


def _existing(resume: bool, overwrite: bool) -> Existing:
    if resume and overwrite:
        raise UserError("--resume and --overwrite exclude each other")
    return "resume" if resume else "overwrite" if overwrite else "refuse"


def main() -> None:
    """Entry point: user errors become one line and exit code 2."""
    # Written before the first CUDA call: lets freed blocks serve tensors of other shapes.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    torch.set_float32_matmul_precision("high")
    try:
        app()
    except UserError as error:
        errors = Console(stderr=True)
        errors.print("[bold red]error:[/]", end=" ")
        errors.print(str(error), markup=False, highlight=False, soft_wrap=True)
        raise SystemExit(2) from None
