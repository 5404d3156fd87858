"""Refuses batches whose activations cannot fit into memory, before anything is allocated.

A lower bound: the widest activations of one layer, or for a step with a cache all of the cache.
Most batches that it lets pass need far more.
"""

from gaugelasso.errors import UserError
from gaugelasso.memory import free_bytes, memory_bytes
from gaugelasso.models import TransformerSpec

# More are typing errors: no supported machine has the memory.
_MOST = 1e11


def check_activations(
    widest: int,
    length: int,
    batch: int,
    name: str = "train.batch =",
    remedy: str = "lower it or task.length, or use train.accumulate",
    device: str | None = None,
    itemsize: int = 4,
    what: str = "activations per layer",
) -> None:
    """UserError for batches whose activations, the widest of this width, have no place.

    `name` is how the user gave the batch. On a CPU the place is its memory, on a GPU what is free
    of it, for activations of `itemsize` bytes; without a `device` it is what no machine has.
    """
    values, most, held = batch * length * widest, _MOST, f"the limit of {_MOST:.0e}"
    if device == "cpu":
        room = memory_bytes()
        most, held = room / itemsize, f"the {room / 1e9:.3g} GB of memory here can hold"
    elif device is not None and device.startswith("cuda"):
        room = free_bytes(device)
        most, held = room / itemsize, f"the {room / 1e9:.3g} GB that are free on the GPU can hold"
    if values > most:
        fit = f"at most {most // (length * widest):,.0f} sequences could fit"
        raise UserError(
            f"{name} {batch} sequences of {length} positions make {values:.2g} {what}, more than "
            f"{held}; {fit}: {remedy}"
        )


def widest(spec: TransformerSpec) -> int:
    """The most activations of one position that are in memory at the same time."""
    filters = (each.filters for each in spec.operators if each.kind == "mlp")
    return max(len(spec.sites), spec.outputs, *filters)


def cached(spec: TransformerSpec) -> int:
    """The keys and values of one position in all layers of a cache."""
    widths = (
        each.kv_heads * (each.keys * (2 if each.frequencies else 1) + each.values)
        for each in spec.operators
        if each.kind == "attention"
    )
    return sum(widths) or 1
