"""Which cost model the options choose, and what a model costs by several of them side by side."""

from pathlib import Path
from typing import Any

import torch

from gaugelasso.axes import AxisTable, Compressible, named_tensors
from gaugelasso.compress.latency import Latency
from gaugelasso.compress.memory import Memory
from gaugelasso.compress.options import CompressorOptions
from gaugelasso.compress.pricing import ACCOUNTINGS, CostModel, least_cost, total_fma
from gaugelasso.compress.time_table import TimeTable
from gaugelasso.errors import UserError
from gaugelasso.kernels.hardware import hardware


def chosen(options: CompressorOptions, timed: Latency | None) -> CostModel:
    """The cost model of `compress.accounting`; `timed` is that of `compress.profile`."""
    if options.accounting == "bytes":
        return memory(options)
    if options.accounting != "latency":
        return ACCOUNTINGS[options.accounting]
    if timed is None:
        raise UserError(
            "compress.accounting = 'latency' needs compress.profile, the table that gaugelasso "
            "profile CONFIG --out TABLE writes"
        )
    return timed


def least_work(model: Compressible, options: CompressorOptions) -> float:
    """What no cut of the model leads below, by the accounting.

    0 for milliseconds: a measured time may be shorter at a larger width.
    """
    if options.accounting == "latency":
        return 0.0
    cost = chosen(options, None)
    return least_cost(model.axis_table(), cost, named_tensors(model))


def memory(options: CompressorOptions) -> Memory:
    return Memory(options.serving_dtype, options.serving_batch, options.serving_length)


def latency(options: CompressorOptions, device: torch.device) -> Latency | None:
    """The times of `compress.profile`, if there is one, for a run on this device.

    UserError unless they were measured on this device or on the one that is named.
    """
    if not options.profile:
        return None
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
    model: Compressible, options: CompressorOptions, timed: Latency | None
) -> dict[str, Any]:
    """FMA per token, bytes, and by a profile the milliseconds of a model, for a run's files.

    The milliseconds are estimates: sums of measured operations.
    """
    table, tensors = model.axis_table(), named_tensors(model)
    kept = memory(options)
    found: dict[str, Any] = {
        "fma": total_fma(table, ACCOUNTINGS["fma"], tensors),
        "bytes": total_fma(table, kept, tensors),
        "bytes_of": described(kept, table),
    }
    if timed is not None and table.operations:
        found["ms"] = total_fma(table, timed, tensors)
        found["ms_of"] = f"estimated, {timed.table.circumstances.described}"
        found["profile"] = timed.table.digest
    return found


def described(kept: Memory, table: AxisTable) -> str:
    """What a number of bytes is of."""
    weights = f"weights in {kept.dtype}"
    if not any(cost.kind == "cache" for cost in table.costs):
        return weights
    return f"{weights}, cache of {kept.batch}×{kept.length or table.context[0]} tokens"
