"""The command profile: measures the operations of a served model, for prices in milliseconds."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import torch
import typer

from gaugelasso.bench.profile import Profile, estimate
from gaugelasso.cli.arguments import Changes, Device, load_settings, parse_changes
from gaugelasso.cli.output import console, print_line
from gaugelasso.config import Config, run_config
from gaugelasso.config.activations import cached, check_activations, widest
from gaugelasso.errors import UserError
from gaugelasso.memory import says_what_fits
from gaugelasso.models import Transformer
from gaugelasso.report.formats import milliseconds
from gaugelasso.report.timing import apart
from gaugelasso.runs.reading import exists, is_folder
from gaugelasso.runs.structures import Structure
from gaugelasso.runs.writing import check_writable, make_folder, write_json
from gaugelasso.tasks import Draw
from gaugelasso.training.evaluation import choose_device, configure_cpu_

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Seconds between lines, where there is no terminal.
_LINE_EVERY = 5.0


def profile(
    what: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG|RUN",
            help="Configuration file (TOML) or run folder: its initial model has the widths up to "
            "which times are measured.",
        ),
    ],
    batch: Annotated[int, typer.Option(min=1, help="Sequences that are served together.")] = 1,
    length: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a sequence; default: the model's length.")
    ] = None,
    decode: Annotated[
        bool,
        typer.Option(
            "--decode",
            help="Measure one more token of each sequence, after a cache of this length, instead "
            "of a pass over whole sequences.",
        ),
    ] = False,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Precision: float32, bfloat16 or float16; default: float32 on a CPU, bfloat16 on "
            "a GPU."
        ),
    ] = None,
    set_: Changes = None,
    device: Device = None,
    out: Annotated[
        Path | None, typer.Option(help="Table to write; default: profiles/NAME-DEVICE.json.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing table.")
    ] = False,
) -> None:
    """Measure how long the operations of a served model take, over all widths up to the full ones.

    The table is what compress.accounting = "latency" prices channels with: name it in
    compress.profile. Batch and length should be those of serving.

    Example: gaugelasso profile configs/charlm/small.toml --batch 8 --out small.json

    Example: gaugelasso profile configs/charlm/main.toml --device cuda --batch 32 --decode

    Example: gaugelasso train configs/charlm/small.toml --set compress.accounting=latency --set
    compress.profile=small.json
    """
    if is_folder(what):
        settings = run_config(what, parse_changes(set_))
        where = choose_device(device or "auto")
        structure: Structure | None = Structure.read(what / "initial.json")
    else:
        settings = load_settings(what, set_, device)
        where, structure = choose_device(settings.train.device), None
    kind = torch.device(where).type
    path = out or Path("profiles") / f"{what.stem}-{kind}{'-decode' if decode else ''}.json"
    check_writable(path)  # before the measurement, which may take minutes
    if exists(path) and not overwrite:
        raise UserError(
            f"table {str(path)!r} already exists; add --overwrite to replace it, or choose another "
            "--out"
        )
    named = dtype or ("bfloat16" if kind == "cuda" else "float32")
    if named not in _DTYPES:
        raise UserError(f"--dtype {named}: choose one of {', '.join(_DTYPES)}")
    configure_cpu_(settings, where)
    model = _model(settings, structure).to(where).eval()
    longest = model.initial_spec.length
    if length is not None and length > longest:
        raise UserError(f"--length {length}: the model's sequences have {longest} tokens at most")
    length, spec = length or longest, model.spec()
    check_activations(
        cached(spec) if decode else widest(spec), length, batch, "--batch",
        "lower it or --length", where, _DTYPES[named].itemsize,
        "keys and values" if decode else "activations per layer",
    )  # fmt: skip
    inputs, _ = settings.task.batch(batch, Draw(settings.train.seed), where)
    with says_what_fits(batch, where), _shown() as show:
        show("measuring the fastest forms of the model")
        measured = Profile(model, inputs[:, :length], _DTYPES[named], decode=decode)
        table = measured.measure(
            lambda done, of: show(f"measuring: {done} of {of} kinds of operations")
        )
        by_table, whole = estimate(model, table), measured.whole()
    make_folder(path.parent)
    write_json(path, table.to_dict())
    print_line(
        f"the model of {str(what)!r} takes {milliseconds(by_table)} by the table and "
        f"{milliseconds(whole)} as a whole ({table.circumstances.described})"
    )
    if warning := apart(by_table, whole):
        print_line(f"warning: {warning} with --overwrite")
    print_line(f"table: {path}")


@contextmanager
def _shown() -> Iterator[Callable[[str], None]]:
    """Yields what shows how far a measurement is: in one place on a terminal, else in lines."""
    if console.is_terminal:
        with console.status("") as status:
            yield status.update
        return
    last = float("-inf")

    def line(text: str) -> None:
        nonlocal last
        if time.monotonic() - last >= _LINE_EVERY:
            last = time.monotonic()
            print_line(text)

    yield line


def _model(settings: Config, structure: Structure | None) -> Transformer:
    seed = settings.train.seed
    model = structure.build(seed) if structure else settings.model.build(settings.task, seed)
    if not isinstance(model, Transformer):
        raise UserError(
            f"the model is a {type(model).__name__}; profile measures the inference form, which "
            "the built-in transformer has"
        )
    return model
