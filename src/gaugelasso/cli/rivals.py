"""Commands of rival methods that rank channels of a trained model: prune, torch-pruning."""

import math
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from gaugelasso.baselines.post_hoc import PrunePlan
from gaugelasso.baselines.pruning import PruneTrainer, prune_settings
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
    parse_changes,
)
from gaugelasso.cli.rival_runs import WORK, Work, check_one_of, check_work, run_rival, source_of
from gaugelasso.config import run_config
from gaugelasso.errors import UserError

_ROUNDS = 10
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
    check_one_of(fma, "loss", loss)
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
    source = source_of(run)
    given = rounds or _ROUNDS, channels or 1, corrective or (10 if fma is None else 100)
    plan = PrunePlan(loss, fma, *given, finetune or _cooldown(run))
    settings = prune_settings(source, plan, parse_changes(set_, device))
    begin = partial(PruneTrainer, source, plan, settings)
    run_rival("post-hoc pruning", begin, out or run / "pruned", resume, overwrite)


def torch_pruning(
    run: RunPath,
    fma: Annotated[float, WORK],
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
    check_work(fma)
    if reg is not None and not 0 <= reg < math.inf:
        raise UserError(f"--reg {reg:g}: must be a finite number of at least 0")
    for name, value in (("sparse", sparse), ("reg", reg)):
        if value is not None and mode == "magnitude":
            raise UserError(
                f"--{name} {value:g}: --mode magnitude trains nothing before the rounds; leave it "
                "out, or give --mode group-norm"
            )
    source = source_of(run)
    default = 9 * int(source.summary["steps"]) // 14 if mode == "group-norm" else 0
    plan = TorchPruningPlan(
        None, fma, rounds, 1, corrective, finetune or _cooldown(run), sparse or default,
        PrunerOptions(mode, ranking, REG if reg is None else reg),
    )  # fmt: skip
    settings = torch_pruning_settings(source, plan, parse_changes(set_, device))
    begin = partial(TorchPruningTrainer, source, plan, settings)
    run_rival("Torch-Pruning", begin, out or run / "torch-pruning", resume, overwrite)


def _cooldown(run: Path) -> int:
    if not (steps := run_config(run).train.cooldown):
        raise UserError("--finetune: the run has train.cooldown = 0; give a number of steps")
    return steps
