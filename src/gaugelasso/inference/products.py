"""Which library computes the products of a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def without_onednn() -> Iterator[None]:
    """Within this context, products are left to BLAS.

    PyTorch prefers oneDNN on some CPUs where it is several times slower for batches of small
    products. The switch is one of the whole process; it changes no result beyond rounding.
    """
    switch = torch.backends.mkldnn
    before = switch.enabled
    setattr(switch, "enabled", False)  # noqa: B010 (its type is that of a property)
    try:
        yield
    finally:
        setattr(switch, "enabled", before)  # noqa: B010
