"""The command that compresses a pretrained model: import, measure, choose, train, export.

Each stage is what the command of its name does. A stage that is finished is in the folder, and
--resume skips it.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from gaugelasso.cli.arguments import (
    Changes,
    Device,
    choose_existing,
    keys_as_options,
    warn_unfinished,
)
from gaugelasso.cli.compression_folder import Stages, opened
from gaugelasso.cli.compression_given import check_tokenizer, is_run, read_given, resolved
from gaugelasso.cli.compression_options import (
    NO_FORM,
    Share,
    Wanted,
    check_form,
    parse_share,
    parse_wanted_changes,
)
from gaugelasso.cli.compression_original import Original, measure_original, named_loss
from gaugelasso.cli.compression_plan import (
    Plan,
    check_before_import,
    check_same_plan,
    plan,
    write_plan,
)
from gaugelasso.cli.compression_result import Result
from gaugelasso.cli.display import show_progress
from gaugelasso.cli.output import console, print_line
from gaugelasso.cli.trainers import build_trainer
from gaugelasso.compress.result import TargetMissed
from gaugelasso.config.base import BaseModel
from gaugelasso.distributed import started_as
from gaugelasso.errors import UserError
from gaugelasso.export import FORMS, STOCK, check_gguf, check_like_llama
from gaugelasso.export import export as write_export
from gaugelasso.report.layout import render
from gaugelasso.runs.reading import exists
from gaugelasso.runs.writing import check_name
from gaugelasso.signals import stop_requests
from gaugelasso.tasks.stored import expand
from gaugelasso.training.evaluation import choose_device
from gaugelasso.training.records import Progress


def compress(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help="Hugging Face folder, GGUF file, folder that import wrote, or run folder; of a "
            "folder that compress wrote, its run.",
        ),
    ],
    data: Annotated[
        str,
        typer.Option(metavar="TEXT", help="Text to train on: a file, a folder, or tokens as .npy."),
    ],
    above_original: Annotated[
        str,
        typer.Option(
            metavar="SHARE",
            help="How far the held-out loss may be above the original's, as 3% or 0.03. Without a "
            "sign, 3 is refused.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    valid: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="Held-out text; task.valid.",
            show_default="the last 5% of --data",
        ),
    ] = None,
    form: Annotated[
        str | None,
        typer.Option(
            metavar="|".join([*FORMS, NO_FORM]),
            help="Form to export the result in.",
            show_default="hf, of an encoder native",
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Training steps; train.steps. The default is one pass over the text, but at least "
            "1,000 and at most 4,000: a short text is read several times, a long one in part.",
            show_default="1,000 to 4,000",
        ),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(min=1, help="Windows of a step; train.batch.", show_default="16"),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens of a window; task.length. The result has this context too, unless --set "
            "model.context gives a longer one, up to the model's own.",
            show_default="512, or the model's context",
        ),
    ] = None,
    set_: Changes = None,
    device: Device = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the folder; finished stages are skipped.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a folder that this command wrote.")
    ] = False,
) -> None:
    """Compress a pretrained model: import it, measure it, train it smaller, and export it.

    The original's loss on held-out text is measured first. The result is the smallest model that
    was found with a loss of at most SHARE above it. The progress line says how much less work the
    model does so far, and at which loss.

    The folder receives base (the imported model), original.json (its figures), config.toml (what
    was chosen, for gaugelasso train), run (the run folder), and the exported form. If the loss is
    missed, the exit code is 2 and nothing is exported.

    Example: gaugelasso compress models/SmolLM2-135M --data books --above-original 3% --out small

    Example: gaugelasso compress smol.gguf --data books --above-original 3% --out small --resume

    Example: gaugelasso compress bases/smol --data books --valid b.txt --above-original 0.06
    --out small --form native --steps 2000 --batch 8
    """
    share, changes = parse_share(above_original), parse_wanted_changes(set_, device)
    existing = choose_existing(resume, overwrite)
    check_name(out)
    model = resolved(model)
    given = read_given(model)
    if is_run(model):
        warn_unfinished(model)
        print_line(f"model: that of the run {str(model)!r}, whose loss counts as the original's")
    default = "hf" if given.causal else "native"
    form = default if form is None else form
    check_form(form, given.causal, changes)
    if started_as()[1] > 1:
        raise UserError(
            "compress runs in one process; for several devices stop it once it trains, and start "
            "gaugelasso train with its config.toml and --out under torchrun"
        )
    where = choose_device(changes.get("train.device", "auto"))
    wanted = Wanted(data, valid, share, steps, batch, length, changes)
    with keys_as_options(wanted.options):
        if not (resume and exists(Stages(out).base)):
            check_before_import(wanted, Stages(out).base, given.causal, where)
            if wanted.needs_tokenizer:
                check_tokenizer(model)
        stages = opened(out, model, {"--data": data, "--valid": valid}, existing)
        with stages.removed_on_error():
            if exists(stages.base):
                stages.check_same_base(model)
            else:
                print_line(f"import: {stages.import_base(model)}")
            chosen, original = _measure_and_choose(stages, wanted, where, form)
    print_line(f"train: {chosen.describe()}")
    if (shorter := chosen.describe_context()) is not None:
        print_line(f"context: {shorter}")
    _train(stages, chosen, original, resume)
    result = Result.load(original, stages.run, chosen, given.parameters)
    render(result.table(), console)
    print_line(f"curves and structure: gaugelasso report {stages.run}")
    if result.above > share.value:
        raise _missed(stages.run, result, share, default if form == NO_FORM else form)
    if not result.summary["held"]:
        print_line(
            f"note: target.loss = {chosen.config.target.loss:g} follows from selection data. The "
            f"original has {original.test.loss:.4f} on test data, so 'held' is false in the run's "
            "summary.json"
        )
    if (unused := result.unused(share)) is not None:
        print_line(f"note: {unused}")
    _export(stages, form)
    print_line(f"folder: {out}")


def _check_family(form: str, chosen: Plan) -> None:
    model = chosen.config.model
    assert isinstance(model, BaseModel)
    spec, path = replace(model.base.spec, length=model.context), model.base.path
    if form in STOCK:
        check_like_llama(spec, form, path)
    if form == "gguf":
        given = chosen.task.tokenizer  # empty for arrays of tokens
        check_gguf(spec, path, expand(given, "task.tokenizer") if given else None)


def _measure_and_choose(
    stages: Stages, wanted: Wanted, device: str, form: str
) -> tuple[Plan, Original]:
    """The config with its target, and the original's figures; both are written."""
    with (
        stop_requests() as request,
        request.interruptible("before the first step; go on with --resume"),
    ):
        chosen = plan(stages.base, wanted)
        _check_family(form, chosen)
        if exists(stages.config):
            original = Original.load(stages.original)
            chosen = chosen.with_target(named_loss(original, wanted.share, chosen))
            check_same_plan(stages.config, chosen)
            return chosen, original
        original = measure_original(chosen, device)
    unit = chosen.task.loss_unit
    print_line(f"original: {original.describe(unit)}")
    named = named_loss(original, wanted.share, chosen)
    origin = f"{1 + wanted.share.value:g} x {original.selection.loss:.6g}"
    print_line(f"target: {named:.4f} {unit} = {origin}")
    chosen = chosen.with_target(named)
    original.save(stages.original)
    # Last: the stage is finished when config.toml is there.
    write_plan(stages.config, chosen, f"{origin}, the original's loss on selection data")
    return chosen, original


def _train(stages: Stages, chosen: Plan, original: Original, resume: bool) -> None:
    """Train, unless that is finished."""
    if exists(stages.run / "summary.json"):
        return
    title = f"{stages.out.absolute().name}, seed {chosen.config.train.seed}"
    log, price = stages.run / "metrics.jsonl", _price(original, chosen)
    with show_progress(console, title, log, price) as on_progress:
        existing = "resume" if resume else "refuse"
        trainer = build_trainer(chosen.config, stages.run, existing, on_progress)
        if trainer.compressor.steps:
            print_line(f"resuming after step {trainer.compressor.steps:,}")
        try:
            trainer.run()
        except TargetMissed:
            # The run compares test data with a loss that follows from selection data. Here the
            # original's loss on the same data counts.
            return


def _price(original: Original, chosen: Plan) -> Callable[[Progress], str]:
    """What a row of the run has bought, and the share of the original's loss that it costs."""
    target = chosen.config.target.loss
    assert target is not None
    allowed = target / original.selection.loss - 1

    def price(progress: Progress) -> str:
        bits, times = progress.row[progress.metric_name], progress.compression
        bought = f"{times:.2f}x less work" if times > 1 else "nothing yet"
        # Bits are proportional to the loss.
        paid = "not measured yet" if bits is None else f"{bits / original.during - 1:+.2%} loss"
        return f"bought: {bought}, price: {paid} (allowed {allowed:+.2%})"

    return price


def _missed(run: Path, result: Result, share: Share, form: str) -> TargetMissed:
    cut = "" if result.is_smaller else ", in which nothing was cut"
    return TargetMissed(
        f"--above-original {share.text} was missed in {result.summary['steps']:,} steps{cut}: the "
        f"result has {result.loss:.4f} {result.unit} on test data, {result.above:+.2%} beside the "
        f"original's {result.original.test.loss:.4f}. It is in {str(run)!r} and was not exported; "
        f"gaugelasso export {run} --form {form} does so all the same. Raise --above-original or "
        "--steps, or give more text"
    )


def _export(stages: Stages, form: str) -> None:
    if form == NO_FORM:
        return
    target = stages.out / form
    if exists(target):
        print_line(f"export: {str(target)!r} is there already")
        return
    done = write_export(stages.run, form, target, say=print_line)
    print_line(f"export: {done}, in {str(target)!r}")
