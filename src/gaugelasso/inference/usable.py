"""Whether a form can be used on this device: it runs there, and computes what others do."""

from collections.abc import Callable

import torch
from torch import Tensor

from gaugelasso.errors import UserError
from gaugelasso.kernels.dispatch import available

# How far one form may be from another, as a share of the largest number: a few times what rounding
# does, which comes at other places in each form.
_FAR = {torch.float32: 1e-4, torch.float64: 1e-10}
_FAR_IN_HALF = 0.02


def works(action: Callable[[], object], name: str = "") -> bool:
    """Whether this device can do it: it may lack shared memory, or a library a kernel.

    Or the activations are too many for the offsets of a kernel, which is a UserError. A fault that
    ends all work on the device, as an illegal memory access does, is raised, with the name: later
    it would show anywhere.
    """
    errors: tuple[type[Exception], ...] = (RuntimeError, UserError)
    if available():
        from triton.runtime.errors import OutOfResources

        errors = (*errors, OutOfResources)
    try:
        action()
        _wait()
    except errors as error:
        try:
            _wait()
        except RuntimeError:
            error.add_note(f"in {name or action}")
            raise error from None
        return False
    return True


def _wait() -> None:
    """For a GPU, if one is in use; a RuntimeError if it can do nothing more."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


class Disagrees(RuntimeError):
    """A form does not compute what another one does."""


def check_agrees(action: Callable[[], Tensor], expected: Tensor, repeats: int = 3) -> None:
    """Disagrees unless a form gives the same each time, and what is expected but for rounding."""
    got = action()
    far = _FAR.get(expected.dtype, _FAR_IN_HALF) * float(expected.abs().max() if got.numel() else 0)
    # By rows, as float32 of all logits at once may not fit; False for NaN.
    close = all(bool(((a - b).abs() <= far).all()) for a, b in zip(
        got.split(4096), expected.split(4096), strict=True))  # fmt: skip
    if not close or not all(torch.equal(action(), got) for _ in range(repeats - 1)):
        raise Disagrees
