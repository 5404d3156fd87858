"""The command line. Parses, calls, prints; errors that are the user's to mend exit with 2."""

import contextlib
import logging
import os
import shlex
import sys
import tomllib
import warnings
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from gaugelasso import checkpoint
from gaugelasso.bench import bench_run, bench_step, default_file, record
from gaugelasso.checkpoint import load_spec
from gaugelasso.cluster import Cluster, parse_settings
from gaugelasso.config import Config, changed, load_config, run_config
from gaugelasso.display import show_progress
from gaugelasso.errors import UserError
from gaugelasso.evaluation import choose_device, evaluate, final_figures
from gaugelasso.models.decoding import sample
from gaugelasso.ranks import join, started_as
from gaugelasso.report import home, write_comparison, write_pareto, write_report
from gaugelasso.report.advice import advise as suggest
from gaugelasso.report.arms import arms_table
from gaugelasso.report.data import Condition, load_condition, load_run
from gaugelasso.report.layout import render, to_markdown
from gaugelasso.report.results import collect_arms, collect_results, results_table
from gaugelasso.report.tables import print_outcome, print_structure
from gaugelasso.report.timing import print_bench
from gaugelasso.runs import Existing, RunFolder, make_folder, write_json, write_text
from gaugelasso.show import show_divisions
from gaugelasso.sweep import ArmOutcome, parse_arms, parse_seeds, run_sweep, said_failures
from gaugelasso.tasks.text import readable
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
RunPaths = Annotated[
    list[Path], typer.Argument(metavar="RUN...", help="Run folders, or folders with runs in them.")
]
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
    existing, where = _existing(resume, overwrite), choose_device(settings.train.device)
    team = join(where.startswith("cuda"), settings.train.rank_timeout)
    if team.rank:  # rank 0 speaks for all
        logging.disable(logging.WARNING)
        Trainer(settings, folder, existing, team=team).run()
        team.close()
        return
    with show_progress(console, title) as on_progress:
        Trainer(settings, folder, existing, on_progress, team).run()
    team.close()
    print_outcome(load_run(folder), console)
    say(f"run folder: {folder}")


@app.command(name="eval")
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
    settings = changed(settings.to_dict(), _pairs(set_))
    where = choose_device(device or "auto")
    model, task = checkpoint.load_model(run, where), settings.task
    if (task.length, task.inputs) != (model.birth.length, model.birth.inputs):
        raise UserError(f"{str(run)!r}: the model does not fit this task's length or inputs")
    if whole:
        figures, of = final_figures(model, settings, batches, where), "all held-out data"
        if not figures:
            raise UserError(f"--whole: task {settings.task_name!r} has no end; use --batches")
    else:
        loss, metric = evaluate(model, settings, batches, where)
        figures = {"loss": loss, task.metric_name: metric}
        of = f"{batches} batches of {settings.train.batch}"
    say("  ".join(f"{name} {value:.6f}" for name, value in figures.items()) + f"  ({of})")


@app.command()
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
    model = checkpoint.load_model(run, where).eval()
    generator = torch.Generator(where).manual_seed(seed)
    # Bytes of the command line that are no UTF-8 stay what they are.
    start = prompt.encode(errors="surrogateescape")
    tokens = sample(model, start, temperature=temperature, top_k=top_k, generator=generator)
    for piece in readable(chain(start, islice(tokens, length))):
        typer.echo(piece, nl=False)
    typer.echo()


@app.command()
def report(
    runs: RunPaths,
    out: Out = None,
) -> None:
    """Draw what happened: profile, saturation, curves, and a one-page HTML report.

    Example: gaugelasso report runs/demo
    """
    files = write_report(runs, out)
    for name, path in (
        ("structural profile", files.profile),
        ("saturation", files.saturation),
        ("training curves", files.training),
        ("examples", files.samples),
        ("report", files.page),
    ):
        if path is not None:
            say(f"{name}: {path}")


@app.command()
def pareto(runs: RunPaths, out: Out = None) -> None:
    """Draw held-out loss against work for runs with other targets or settings.

    Takes runs, folders of seeds, or a folder of such; what differs names the condition.

    Example: gaugelasso pareto runs/loose runs/main runs/tight --out runs/pareto
    """
    picture, table = write_pareto(runs, out)
    say(table.read_text(encoding="utf-8"))
    say(f"picture: {picture}")
    say(f"table: {table}")


@app.command()
def advise(
    runs: RunPaths,
    out: Annotated[
        Path | None, typer.Option(help="Config to write; default next.toml in RUN.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing config.")
    ] = False,
) -> None:
    """Say which axes to widen or narrow next, and write the next config.

    Example: gaugelasso advise runs/demo --out configs/second.toml

    Example: gaugelasso train runs/demo/next.toml --out runs/second
    """
    advice = suggest(runs)
    for line in advice.lines:
        say(line)
    # A config that could not be trained is not worth a file.
    Config.from_dict(tomllib.loads(advice.config))
    path = out or home(runs) / "next.toml"
    if path.exists() and not overwrite:
        raise UserError(
            f"config {str(path)!r} already exists; add --overwrite to replace it, "
            "or choose another --out"
        )
    make_folder(path.parent)
    write_text(path, advice.config)
    say(f"next config: {path}")


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
    arm: Annotated[
        list[str] | None,
        typer.Option(
            metavar="'NAME: KEY=VALUE ...'",
            help="A condition to compare: what it changes on top of --set, or nothing. Repeat "
            "it for more; all seeds of all arms share --jobs.",
        ),
    ] = None,
    set_: Changes = None,
    out: Out = None,
    device: Device = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    results: Annotated[
        Path | None, typer.Option(help="Also write the results file (JSON) here.")
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Hand the runs to a cluster through submitit: slurm, or local to try it. Jobs go "
            "on when this command is broken off; once they have ended, give it again with "
            "--resume to collect them.",
        ),
    ] = None,
    cluster_set: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="A setting of submitit: timeout_min=240, gpus_per_node=1, slurm_partition=gpu.",
        ),
    ] = None,
) -> None:
    """Train several seeds, processes side by side; one failure does not stop the rest.

    Example: gaugelasso sweep configs/retrieval/main.toml --seeds 42-46 --jobs 5

    Example: gaugelasso sweep demo.toml --arm "baseline:" --arm "wide trust: compress.trust=4"

    Example: gaugelasso sweep demo.toml --jobs 20 --cluster slurm --cluster-set timeout_min=240
    """
    numbers = parse_seeds(seeds)
    if cluster is None and cluster_set:
        raise UserError(f"--cluster-set {cluster_set[0]}: for use with --cluster")
    if cluster is not None and overwrite:
        raise UserError("--overwrite with --cluster: a job that queues again would lose its run")
    here = cluster is None
    settings = [_load(config, set_, device, here)]
    folder = out or Path("runs") / config.stem
    arms = parse_arms(arm or [], folder)
    for each in arms:
        try:
            settings.append(_load(config, [*(set_ or []), *each.changes], device, here))
        except UserError as error:
            raise UserError(f"--arm {each.name!r}: {error}") from None
    arguments = [part for change in set_ or [] for part in ("--set", change)]
    arguments += ["--device", device] if device else []
    arguments += ["--resume"] if resume or cluster else []
    arguments += ["--overwrite"] if overwrite else []
    if _existing(resume, overwrite) == "refuse":
        # Before any run starts: a log of an earlier run must not be touched either.
        for each in arms:
            for seed in numbers:
                RunFolder.check_free(each.run_folder(seed))
    if results is not None:
        make_folder(results.parent)
    home = Cluster(cluster, parse_settings(cluster_set or []), folder) if cluster else None
    on_gpu = not home and any(
        choose_device(one.train.device).startswith("cuda") for one in settings
    )
    outcomes = run_sweep(config, numbers, arms, jobs, arguments, console, on_gpu, home)
    ended = [outcome for outcome in outcomes if outcome.ended]
    if arm and ended:
        _write_arms(ended, len(numbers), folder, results)
    elif ended:
        collected = _write_results(ended[0])
        if results is not None:
            write_json(results, collected)
        say(results_table(collected, config.stem))
        say(f"report: {write_report(ended[0].folders, folder / 'report').page}")
    if failures := said_failures(outcomes, len(numbers)):
        raise UserError(failures)


def _write_results(outcome: ArmOutcome) -> dict[str, Any]:
    """The results file of one arm, in its folder."""
    collected = collect_results(outcome.folders) | {"command": _command()}
    write_json(outcome.arm.folder / "results.json", collected)
    return collected


def _write_arms(ended: list[ArmOutcome], seeds: int, folder: Path, results: Path | None) -> None:
    """Results first, of each arm and of all, then what is drawn of them."""
    for outcome in ended:
        _write_results(outcome)
    conditions = [
        Condition(one.arm.name, one.arm.changes, load_condition(one.folders), seeds)
        for one in ended
    ]
    collected = collect_arms(conditions) | {"command": _command()}
    for path in filter(None, (folder / "results.json", results)):
        write_json(path, collected)
    table = arms_table(conditions, collected)
    write_comparison(conditions, table, folder)
    for outcome in ended:
        page = write_report(outcome.folders, outcome.arm.folder / "report").page
        say(f"report of {outcome.arm.name}: {page}")
    if console.is_terminal:
        render(table, console)
    else:  # a log has no width that a table could be fitted to
        say(to_markdown(table))
    say(f"comparison: {folder / 'arms.md'}, {folder / 'arms.png'}")


def _command() -> str:
    """The sweep's own command, where its runs know theirs alone."""
    return shlex.join(["gaugelasso", *sys.argv[1:]])


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
    multiple: Annotated[
        int, typer.Option(min=1, help="Round every width up to a multiple of this.")
    ] = 1,
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
        if structure or set_ or multiple > 1:
            raise UserError("--inference takes structure and settings from RUN: leave out "
                            "--structure, --multiple and --set")  # fmt: skip
        settings = run_config(what)
        where = choose_device(device or "auto")
        rows = bench_run(what, work or what.name, settings, where, repeats)
    else:
        settings = _load(what, set_, device)
        where = choose_device(settings.train.device)
        spec = load_spec(structure) if structure else settings.model.spec(settings.task)
        kind = ("-structure" if structure else "") + (f"-by{multiple}" if multiple > 1 else "")
        rows = {work or what.stem + kind: bench_step(settings, spec, where, repeats, multiple)}
    path = out or default_file(where)
    for row_name, row in rows.items():
        record(path, where, "inference" if inference else "rows", {"work": row_name, **row})
    print_bench(rows, console)
    say(f"benchmark file: {path}")


def _load(path: Path, changes: list[str] | None, device: str | None, here: bool = True) -> Config:
    """The settings; if they are to run `here`, their device must be."""
    pairs = _pairs(changes)
    if device is not None:
        pairs["train.device"] = device
    settings = load_config(path, pairs)
    if here:
        choose_device(settings.train.device)
    return settings


def _pairs(changes: list[str] | None) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for change in changes or []:
        key, equals, value = change.partition("=")
        if not equals:
            raise UserError(f"--set {change!r}: write it as key=value, e.g. train.steps=2000")
        pairs[key.strip()] = value.strip()
    return pairs


def _existing(resume: bool, overwrite: bool) -> Existing:
    if resume and overwrite:
        raise UserError("--resume and --overwrite exclude each other")
    return "resume" if resume else "overwrite" if overwrite else "refuse"


def _rank() -> int:
    with contextlib.suppress(UserError):  # which may be what is to be said
        return started_as()[0]
    return 0


def set_up_process() -> None:
    """What torch should know before its first call."""
    # Lets freed blocks of a GPU serve tensors of other shapes.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    # On ARM each product of matrices is compiled for its shape. Shapes that a cut has made
    # obsolete need no room: torch would keep a thousand.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "256")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.9 warns of this call of its own
        torch.set_float32_matmul_precision("high")


def main() -> None:
    """Entry point: user errors become one line, and an exit code of their own."""
    set_up_process()
    try:
        app()
    except UserError as error:
        errors = Console(stderr=True)
        errors.print("[bold red]error:[/]", end=" ")
        if rank := _rank():
            errors.print(f"rank {rank}:", end=" ", highlight=False)
        errors.print(str(error), markup=False, highlight=False, soft_wrap=True)
        raise SystemExit(error.exit_code) from None
