"""The command `cofi`: masks that are learned during training."""

import math
from functools import partial
from typing import Annotated

import typer

from gaugelasso.baselines.cofi import MASK_BOUND, MASK_RATE, CofiPlan, Objective
from gaugelasso.baselines.cofi_run import CofiTrainer, cofi_settings
from gaugelasso.cli.arguments import (
    Changes,
    Device,
    Out,
    Overwrite,
    Resume,
    RunPath,
    parse_changes,
)
from gaugelasso.cli.rival_runs import Work, check_one_of, run_rival, source_of
from gaugelasso.errors import UserError


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
        typer.Option(
            help="Most that the logit of a mask can be, up or down; 0 for no bound.",
            show_default="ln 100",
        ),
    ] = MASK_BOUND,
    layer_distill: Annotated[
        float,
        typer.Option(
            help="Weight of the distance of layers to those of the full model, while there are "
            "masks; 0 for none."
        ),
    ] = 0.0,
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
    check_one_of(fma, "parameters", parameters)
    if not 0 <= distill <= 1:
        raise UserError(f"--distill {distill:g}: must be a number from 0 to 1")
    if not 0 < mask_rate <= 10:
        raise UserError(f"--mask-rate {mask_rate:g}: must be above 0 and at most 10")
    if not 0 <= mask_bound < math.inf:
        raise UserError(f"--mask-bound {mask_bound:g}: must be a finite number of at least 0")
    if not 0 <= layer_distill < math.inf:
        raise UserError(f"--layer-distill {layer_distill:g}: must be a finite number of at least 0")
    source = source_of(run)
    steps = int(source.summary["steps"])
    phases = warmup or steps // 14, prune or 8 * steps // 14, finetune or 5 * steps // 14
    objective: Objective = "parameters" if fma is None else "fma"
    weights = distill, mask_rate, mask_bound, layer_distill
    plan = CofiPlan(objective, fma or parameters or 0.0, *phases, *weights)
    settings = cofi_settings(source, plan, parse_changes(set_, device))
    begin = partial(CofiTrainer, source, plan, settings)
    run_rival("CoFi", begin, out or run / "cofi", resume, overwrite)
