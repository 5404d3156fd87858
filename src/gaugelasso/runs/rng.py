"""The state of torch's random number generators, of the CPU and of every GPU, as tensors.

Nothing in this package draws from them, but a user's loss, model or hook may.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from gaugelasso.errors import UserError


def rng_state() -> dict[str, Tensor]:
    """Return the states by device; those of GPUs only if CUDA is in use."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        state |= {f"cuda:{i}": each for i, each in enumerate(torch.cuda.get_rng_state_all())}
    return state


def set_rng_state_(state: Mapping[str, Tensor]) -> None:
    """Restore the states; those of GPUs that this machine does not have are ignored."""
    here = rng_state()
    if "cpu" not in state:
        raise UserError("'cpu' is missing")
    for name, saved in state.items():
        if name in here and (saved.dtype, saved.shape) != (here[name].dtype, here[name].shape):
            raise UserError(f"{name!r} is not the state of a random number generator")
    for name in here.keys() & state.keys():
        if name == "cpu":
            torch.set_rng_state(state[name].clone())
        else:
            torch.cuda.set_rng_state(state[name].clone(), name)
