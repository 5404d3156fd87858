"""Commands of rival methods, which begin with a trained model: prune, cofi, torch-pruning."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from gaugelasso.baselines.cofi import MASK_BOUND, MASK_RATE, CofiPlan, Objective
from gaugelasso.baselines.cofi_run import CofiTrainer, cofi_settings
from gaugelasso.baselines.post_hoc import PrunePlan
from gaugelasso.baselines.pruning import PruneTrainer, prune_settings
from gaugelasso.baselines.source import Source
from gaugelasso.baselines.torch_pruning_choice import REG, Mode, PrunerOptions, RankingScope
from gaugelasso.baselines.torch_pruning_run import (
    TorchPruningPlan,
    TorchPruningTrainer,
    torch_pruning_settings,
)
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
from gaugelasso.cli.trainers import outcome_shown, print_start
from gaugelasso.config import run_config
from gaugelasso.errors import UserError
from gaugelasso.report.data import check_finished, load_run
from gaugelasso.training.records import Progress
from gaugelasso.training.trainer import Trainer

_WORK = typer.Option(help="The work per token to reach, by the accounting of the run.")
Work = Annotated[float | None, _WORK]
_ROUNDS = 10
Shown = Callable[[Progress], None]
Finetune = Annotated[
    int | None,
    typer.Option(
        min=1, help="Steps after the last round.", show_default="train.cooldown of the run"
    ),
]


def prune(
    run: RunPath,
    fma: Work = None,
    loss: Annotated[
        float | None,
        typer.Option(help="Prune until the loss on selection data would exceed this one."),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="With --fma: rounds, each to an interpolated work.",
            show_default=str(_ROUNDS),
        ),
    ] = None,
    channels: Annotated[
        int | None,
        typer.Option(min=1, help="With --loss: channels that a round removes.", show_default="1"),
    ] = None,
    corrective: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Steps at train.lr_min after each round.",
            show_default="100 with --fma, 10 with --loss",
        ),
    ] = None,
    finetune: Finetune = None,
    set_: Changes = None,
    out: Out = None,
    device: Device = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
) -> None:
    """Prune a trained model after its training: post-hoc pruning by the paper's protocol.

    RUN is a finished run of a full model, trained without pressure, such as the folder
    "reference" of a run with target.above_full. Each round ranks the balanced model, removes the
    least efficient channels and takes corrective steps; fine-tuning follows. The default output
    folder is "pruned" in RUN.

    Example: gaugelasso prune runs/full --fma 200000 --out runs/pruned

    Example: gaugelasso prune runs/full --loss 0.1 --corrective 10 --finetune 10000
    """
    _check_one_of(fma, "loss", loss)
    if loss is not None and not math.isfinite(loss):
        raise UserError(f"--loss {loss:g}: must be a finite number")
    if rounds is not None and fma is None:
        raise UserError(
            f"--rounds {rounds}: with --loss, rounds go on to the ceiling; leave it out"
        )
    if channels is not None and fma is not None:
        raise UserError(
            f"--channels {channels}: with --fma, a round removes what its work needs; leave it out"
        )
    source = _source(run)
    given = rounds or _ROUNDS, channels or 1, corrective or (10 if fma is None else 100)
    plan = PrunePlan(loss, fma, *given, finetune or _cooldown(run))
    settings = prune_settings(source, plan, parse_changes(set_, device))
    folder, existing = out or run / "pruned", choose_existing(resume, overwrite)
    _run(
        "post-hoc pruning", folder, resume,
        lambda shown: PruneTrainer(source, plan, settings, folder, existing, shown),
    )  # fmt: skip


def cofi(
    run: RunPath,
    fma: Work = None,
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
    mask_bound: Annotated[
        float,
        typer.Option(help="Most that the logit of a mask can be, up or down; 0 for no bound."),
    ] = MASK_BOUND,
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
    if not 0 <= distill <= 1:
        raise UserError(f"--distill {distill:g}: must be a number from 0 to 1")
    if not 0 < mask_rate <= 10:
        raise UserError(f"--mask-rate {mask_rate:g}: must be above 0 and at most 10")
    if not 0 <= mask_bound < math.inf:
        raise UserError(f"--mask-bound {mask_bound:g}: must be a finite number of at least 0")
    source = _source(run)
    steps = int(source.summary["steps"])
    phases = warmup or steps // 14, prune or 8 * steps // 14, finetune or 5 * steps // 14
    objective: Objective = "parameters" if fma is None else "fma"
    plan = CofiPlan(objective, fma or parameters or 0.0, *phases, distill, mask_rate, mask_bound)
    settings = cofi_settings(source, plan, parse_changes(set_, device))
    folder, existing = out or run / "cofi", choose_existing(resume, overwrite)
    _run(
        "CoFi", folder, resume,
        lambda shown: CofiTrainer(source, plan, settings, folder, existing, shown),
    )  # fmt: skip


def torch_pruning(
    run: RunPath,
    fma: Annotated[float, _WORK],
    mode: Annotated[
        Mode, typer.Option(help="Magnitudes after training, or group norms during training.")
    ] = "magnitude",
    ranking: Annotated[
        RankingScope,
        typer.Option(help="Channels that compete: all, those of equal layers, of a layer."),
    ] = "global",
    sparse: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="With group-norm: steps with regularisation before the rounds.",
            show_default="9/14 of the run's steps",
        ),
    ] = None,
    reg: Annotated[
        float | None,
        typer.Option(
            help="With group-norm: the strength of the regularisation.", show_default=str(REG)
        ),
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=1, help="Rounds, each to an interpolated work.")
    ] = _ROUNDS,
    corrective: Annotated[
        int, typer.Option(min=1, help="Steps at train.lr_min after each round.")
    ] = 100,
    finetune: Finetune = None,
    set_: Changes = None,
    out: Out = None,
    device: Device = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
) -> None:
    """Prune a trained model with the package Torch-Pruning, to a work of our count.

    RUN is a finished run of a full model, trained without pressure. The package, which the extra
    "torch-pruning" installs, prunes plain modules of the same outputs. Rounds, corrective steps and
    fine-tuning are those of "prune"; with --mode group-norm, steps with the package's
    regularisation come before them. The default output folder is "torch-pruning" in RUN.

    Example: gaugelasso torch-pruning runs/full --fma 200000 --out runs/magnitude

    Example: gaugelasso torch-pruning runs/full --fma 200000 --mode group-norm --sparse 20000
    """
    _check_work(fma)
    if reg is not None and not 0 <= reg < math.inf:
        raise UserError(f"--reg {reg:g}: must be a finite number of at least 0")
    for name, value in (("sparse", sparse), ("reg", reg)):
        if value is not None and mode == "magnitude":
            raise UserError(
                f"--{name} {value:g}: --mode magnitude trains nothing before the rounds; leave it "
                "out, or give --mode group-norm"
            )
    source = _source(run)
    default = 9 * int(source.summary["steps"]) // 14 if mode == "group-norm" else 0
    plan = TorchPruningPlan(
        None, fma, rounds, 1, corrective, finetune or _cooldown(run), sparse or default,
        PrunerOptions(mode, ranking, REG if reg is None else reg),
    )  # fmt: skip
    settings = torch_pruning_settings(source, plan, parse_changes(set_, device))
    folder, existing = out or run / "torch-pruning", choose_existing(resume, overwrite)
    _run(
        "Torch-Pruning", folder, resume,
        lambda shown: TorchPruningTrainer(source, plan, settings, folder, existing, shown),
    )  # fmt: skip


def _run(title: str, folder: Path, resume: bool, build: Callable[[Shown], Trainer]) -> None:
    """Make a run with the trainer that `build` returns, and show it and its outcome."""
    with (
        outcome_shown(folder),
        show_progress(console, title, folder / "metrics.jsonl") as on_progress,
    ):
        trainer = build(on_progress)
        if resume:
            print_start(folder, trainer)
        trainer.run()


def _check_work(fma: float | None) -> None:
    if fma is not None and not 0 < fma < math.inf:
        raise UserError(f"--fma {fma:g}: must be a finite number above 0")


def _check_one_of(fma: float | None, other: str, value: float | None) -> None:
    if (fma is None) == (value is None):
        given = "none is given" if fma is None else "both are given"
        raise UserError(f"--fma and --{other}: give one of them; {given}")
    _check_work(fma)


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
