"""Which cost model the options choose, and what a model costs by several of them side by side."""

from pathlib import Path
from typing import Any

import torch

from gaugelasso.axes import AxisTable, Compressible, named_tensors
from gaugelasso.compress.latency import Latency
from gaugelasso.compress.memory import Memory
from gaugelasso.compress.options import CompressorOptions
from gaugelasso.compress.pricing import ACCOUNTINGS, CostModel, total_fma
from gaugelasso.compress.time_table import TimeTable
from gaugelasso.errors import UserError, errors_of
from gaugelasso.kernels.hardware import hardware


def chosen(options: CompressorOptions, device: torch.device) -> CostModel:
    """The cost model of `compress.accounting`, for a run on this device."""
    if options.accounting == "bytes":
        return memory(options)
    if options.accounting == "latency":
        return latency(options, device)
    return ACCOUNTINGS[options.accounting]


def memory(options: CompressorOptions) -> Memory:
    return Memory(options.serving_dtype, options.serving_batch, options.serving_length)


def latency(options: CompressorOptions, device: torch.device) -> Latency:
    """The times of `compress.profile`; UserError unless they are of the device that is named."""
    if not options.profile:
        raise UserError(
            "compress.accounting = 'latency' needs compress.profile, the table that gaugelasso "
            "profile CONFIG --out TABLE writes"
        )
    path = Path(options.profile)
    table = TimeTable.read(path)
    measured, named = table.circumstances.hardware, options.serving_device
    if not named and measured != (here := hardware(str(device))):
        raise UserError(
            f"compress.profile = {str(path)!r} was measured on {measured!r}, and this run is on "
            f"{here!r}; if the model is to be served on the former, set compress.serving_device = "
            f"{measured!r}, else measure here"
        )
    if named and measured != named:
        raise UserError(
            f"compress.serving_device = {named!r}, but compress.profile = {str(path)!r} was "
            f"measured on {measured!r}; name that, or give a profile of the device"
        )
    return Latency(table)


def side_by_side(
    model: Compressible, options: CompressorOptions, device: torch.device
) -> dict[str, Any]:
    """FMA per token, bytes, and by a profile the milliseconds of a model, for logs.

    The milliseconds are estimates: sums of measured operations.
    """
    table, tensors = model.axis_table(), named_tensors(model)
    kept = memory(options)
    found: dict[str, Any] = {
        "fma": total_fma(table, ACCOUNTINGS["fma"], tensors),
        "bytes": total_fma(table, kept, tensors),
        "bytes_of": described(kept, table),
    }
    if options.profile and table.operations:
        timed = latency(options, device)
        with errors_of(Path(options.profile)):
            found["ms"] = total_fma(table, timed, tensors)
        found["ms_of"] = f"estimated, {timed.table.circumstances.described}"
    return found


def described(kept: Memory, table: AxisTable) -> str:
    """What a number of bytes is of."""
    weights = f"weights in {kept.dtype}"
    if not any(cost.kind == "cache" for cost in table.costs):
        return weights
    return f"{weights}, cache of {kept.batch}×{kept.length or table.context[0]} tokens"
