"""The command bench: times a training step, or a compressed model in inference."""

from pathlib import Path
from typing import Annotated, Any

import typer

from gaugelasso.bench.inference import AS_TRAINED, Sizes, bench_run
from gaugelasso.bench.measure import bench_step, shapes_of
from gaugelasso.bench.rows import default_file, read, record
from gaugelasso.cli.arguments import Changes, Device, load_settings
from gaugelasso.cli.output import console, print_line
from gaugelasso.config import run_config
from gaugelasso.errors import UserError
from gaugelasso.report.timing import busy, print_bench
from gaugelasso.runs.checkpoint import load_structure
from gaugelasso.runs.reading import SERVING, check_has_summary, is_folder
from gaugelasso.runs.writing import check_writable
from gaugelasso.training.evaluation import choose_device


def _keep(run: Path, device: str, row: dict[str, Any]) -> bool:
    """Write a row into the run folder too, for its reports; False, with a warning, if it cannot."""
    try:
        record(run / SERVING, device, "inference", row)
        return True
    except UserError as error:
        print_line(f"warning: reports of the run will not show these times: {error}")
        return False


def bench(
    what: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG|RUN",
            help="Configuration file (TOML), or with --inference a run folder.",
        ),
    ],
    inference: Annotated[
        bool,
        typer.Option(
            "--inference",
            help="Time inference with a run's model, with the model before compression, and with "
            "a uniform model of the same work (not for a model of your own).",
        ),
    ] = False,
    structure: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN|JSON", help="Time this structure instead of the initial one of CONFIG."
        ),
    ] = None,
    multiple: Annotated[
        int, typer.Option(min=1, help="Round every width up to a multiple of this.")
    ] = 1,
    work: Annotated[
        str | None, typer.Option(help="Name of the row; default: the name of CONFIG or RUN.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=3, help="Timed repetitions.")] = 30,
    batch: Annotated[
        int | None,
        typer.Option(min=1, help="With --inference: sequences of a batch; default: train.batch."),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(
            min=1, help="With --inference: tokens of a sequence; default: the model's length."
        ),
    ] = None,
    decode: Annotated[
        bool,
        typer.Option(
            "--decode",
            help="With --inference: time one more token of each sequence, after a cache of this "
            "length, instead of a pass over whole sequences.",
        ),
    ] = False,
    set_: Changes = None,
    device: Device = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Benchmark file; default: benchmarks/HARDWARE_DATE.json, and with --inference "
            "serving.json in RUN alone."
        ),
    ] = None,
) -> None:
    """Time the parts of a training step, or the inference of a compressed model.

    Rows of a run are written to serving.json in RUN, for its reports, and to --out if it is given.

    Example: gaugelasso bench configs/retrieval/main.toml --structure runs/main/seed42

    Example: gaugelasso bench runs/demo --inference

    Example: gaugelasso bench runs/fast --inference --batch 16 --decode
    """
    sizes = Sizes(batch, length, decode)
    kind_of_rows = "inference" if inference else "rows"
    if out is not None:  # before the measurement, which may take minutes
        check_writable(out)
        read(out, kind_of_rows)
    if inference:
        if structure or set_ or multiple > 1:
            raise UserError("--inference takes structure and settings from RUN: remove "
                            "--structure, --multiple and --set")  # fmt: skip
        if not is_folder(what):
            raise UserError(f"--inference needs a run folder, and {str(what)!r} is not a folder")
        settings = run_config(what)
        check_has_summary(what)
        where = choose_device(device or "auto")
        timings = bench_run(what, work or what.name, settings, where, repeats, sizes)
    else:
        if sizes != AS_TRAINED:
            raise UserError("--batch, --length and --decode are for --inference: remove them, or "
                            "set train.batch and task.length with --set")  # fmt: skip
        if is_folder(what):
            raise UserError(
                f"{str(what)!r} is a folder: add --inference to time the model of a run, or name a "
                "configuration file (TOML) to time its training step"
            )
        settings = load_settings(what, set_, device)
        where = choose_device(settings.train.device)
        shapes = load_structure(structure) if structure else None
        kind = ("-structure" if structure else "") + (f"-by{multiple}" if multiple > 1 else "")
        row = bench_step(settings, shapes_of(settings, shapes), where, repeats, multiple)
        timings = iter([(work or what.stem + kind, row)])
    path = out if inference else out or default_file(where)
    rows, kept = {}, inference
    for name, row in timings:
        # Written after each device, so that an interruption keeps what was measured.
        if path is not None:
            record(path, where, kind_of_rows, {"work": name, **row})
        if kept:
            kept = _keep(what, where, {"work": name.removeprefix(f"{work or what.name}-"), **row})
        rows[name] = row
        print_line(f"timed {name}")
    print_bench(rows, console)
    if warning := busy(rows):
        print_line(f"warning: {warning}")
    if kept:
        print_line(f"in reports of the run: {what / SERVING}")
    if path is not None:
        print_line(f"benchmark file: {path}")
