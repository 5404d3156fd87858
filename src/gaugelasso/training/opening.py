"""Checks before a run folder is opened: what cannot be trained must not cost a run in it."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from gaugelasso.axes import named_tensors
from gaugelasso.compress import accountings
from gaugelasso.compress.checks import check_work_target
from gaugelasso.compress.compressor import Compressor
from gaugelasso.compress.pricing import total_fma
from gaugelasso.config import Config, ModelConfig
from gaugelasso.config.activations import check_activations, widest
from gaugelasso.config.base import BaseModel
from gaugelasso.errors import UserError, first_line, out_of_memory
from gaugelasso.runs.folder import Existing
from gaugelasso.runs.structures import Structure, check_rebuildable
from gaugelasso.runs.units import amount
from gaugelasso.tasks import (
    SELECTION,
    TEST,
    TRAINING,
    Draw,
    SequenceTask,
    WithBestMetric,
)
from gaugelasso.tasks.own import sequences
from gaugelasso.training.evaluation import in_bfloat16

_log = logging.getLogger(__name__)


def check_named(config: Config) -> None:
    """UserError if the loss of the full model, which the config refers to, is not known yet."""
    if config.target.kind == "above_full" and config.target.reference_loss is None:
        raise UserError(
            "target.above_full needs the loss of the full model: train it first with "
            "gaugelasso.training.reference.with_reference, or set target.reference_loss"
        )


def check_metric(config: Config) -> None:
    """UserError if no model can have the metric that is named."""
    task, named = config.task, config.target.metric
    if named is None or not isinstance(task, WithBestMetric):
        return
    best, lower = task.metric_best, task.metric_lower_is_better
    if named < best if lower else named > best:
        share = ", as 0.99 for 99%" if best == 1 else ""
        raise UserError(
            f"target.metric = {named:g}: the best {task.metric_name} of any model is {best:g}; "
            f"name {best:g} or {'more' if lower else 'less'}{share}"
        )


def check_base(
    config: Config, out: Path, existing: Existing, structure: Structure | None = None
) -> None:
    """UserError if the folder of model.from is missing or changed, or is the output folder.

    Also if --overwrite could remove what the given structure comes from. Only a run that begins
    with the weights of model.from needs a model that fits them.
    """
    if structure is not None and existing == "overwrite":
        _check_kept(structure.path, repr(str(structure.path)), out)
    if not isinstance(config.model, BaseModel):
        return
    base = config.model.base.path
    if out.resolve() == base.resolve() or existing == "overwrite":
        _check_kept(base, "the folder of model.from", out)
    if existing != "resume" and structure is None:
        config.model.check(config.task)


def _check_kept(begun_with: Path, name: str, out: Path) -> None:
    """UserError if this path is the output folder, or in it."""
    if out.resolve() in (begun_with.resolve(), *begun_with.resolve().parents):
        raise UserError(
            f"output {str(out)!r} is or holds {name}, which the run begins with; choose "
            "another --out"
        )


def check_work_named(
    config: Config, device: str, existing: Existing, structure: Structure | None
) -> None:
    """UserError if no cut leads to the work that is named, or a pretrained model has it already.

    Nor where nothing presses. All steps would pass in vain, or without a cut. A fresh model has
    still to be trained, and a run that resumes may be there already.
    """
    model, target = config.model, config.target
    if not target.fma or existing == "resume" or structure is not None:
        return
    built = model.build(config.task, config.train.seed)
    check_work_target("target.fma", target.fma, built, config.compress)
    plain = config.compress.has_no_pressure
    if not plain and (not isinstance(model, BaseModel) or target.kind != "fma"):
        return
    cost = accountings.chosen(
        config.compress, accountings.latency(config.compress, torch.device(device))
    )
    work = total_fma(built.axis_table(), cost, named_tensors(built))
    if plain and work > target.fma:
        raise UserError(
            f"target.fma = {target.fma:g}: nothing is cut with compress.solver = 'fixed' and "
            "compress.rho = 0, which switch the penalty off; leave both out, or set "
            "target.fma = 0 for plain training"
        )
    if isinstance(model, BaseModel) and target.kind == "fma" and work <= target.fma:
        raise UserError(
            f"target.fma = {target.fma:g}: {model.base.title} has "
            f"{amount(work, config.compress.accounting)} in a context of {model.context:,} tokens, "
            "so there is nothing to cut; name less"
        )


def check_memory(
    config: Config, device: str, existing: Existing, structure: Structure | None
) -> None:
    """UserError if a batch of the built-in transformer cannot fit into the memory of a CPU.

    A run that resumes may be smaller by now.
    """
    if existing == "resume" or not isinstance(config.model, ModelConfig):
        return
    if structure is not None and structure.model_class:
        return
    spec = structure.spec() if structure else config.model.spec(config.task)
    itemsize = 2 if in_bfloat16(config, device) else 4
    check_activations(
        widest(spec), spec.length, config.train.batch, device=device, itemsize=itemsize
    )


def check_own_model(config: Config, existing: Existing, structure: Structure | None) -> None:
    """UserError if a model of the user's own cannot be built, saved or compressed.

    A run that resumes has built it before, and one with a given structure builds another one.
    """
    built_in = isinstance(config.model, ModelConfig | BaseModel)
    if built_in or existing == "resume" or structure is not None:
        return
    model = config.model.build(config.task, config.train.seed)
    check_rebuildable(model)
    Compressor(model, 0.0, config.compress)


def check_data(config: Config, device: str) -> None:
    """Read one example of each stream. A target loss below zero is warned of.

    UserError if the built-in transformer does not read such inputs, or its work would be counted
    for sequences of another length.
    """
    built_in = isinstance(config.model, ModelConfig | BaseModel)
    for stream in (TRAINING, SELECTION, TEST):
        inputs, _ = config.task.batch(1, Draw(config.train.seed, 0, stream), device)
        if built_in:
            _check_inputs(sequences(config.task), inputs)
    if (named := config.target.named or 0.0) < 0:
        _log.warning(
            "warning: target.loss = %g is below zero; a cross-entropy or squared error never "
            "gets there", named,
        )  # fmt: skip


def _check_inputs(task: SequenceTask, inputs: Tensor) -> None:
    """UserError unless one example has the positions and values that the task declares."""
    tokens = task.input_kind == "tokens"
    values = () if tokens else (task.inputs + (task.input_kind == "masked_patches"),)
    if tuple(inputs.shape) != (1, task.length, *values):
        raise UserError(
            f"task.batch returns inputs of shape {tuple(inputs.shape)} for one example, and its "
            f"length and inputs declare {(1, task.length, *values)}; correct one of them"
        )
    if not tokens:
        return
    low, high = inputs.min().item(), inputs.max().item()
    if inputs.is_floating_point() or low < 0 or high >= task.inputs:
        raise UserError(
            f"task.batch returns tokens from {low} to {high} ({inputs.dtype}); give whole numbers "
            f"from 0 to {task.inputs - 1}, or declare more inputs"
        )


@contextlib.contextmanager
def memory_errors_named(config: Config) -> Iterator[None]:
    """Turn an error for want of memory into a UserError that names the size of a batch."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        raise UserError(
            f"the model and a batch of train.batch = {config.train.batch} do not fit the memory "
            f"({first_line(error)}); lower train.batch, and raise train.accumulate instead"
        ) from None
