"""The random number generators that torch keeps, as tensors: of the host and of every GPU.

Nothing in this package draws from them; a loss, a model or a hook of yours may.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from gaugelasso.errors import UserError


def rng_state() -> dict[str, Tensor]:
    """The generators by name; those of GPUs only where GPUs are in use."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        state |= {f"cuda:{i}": each for i, each in enumerate(torch.cuda.get_rng_state_all())}
    return state


def set_rng_state_(state: Mapping[str, Tensor]) -> None:
    """Take up a state; of GPUs that are not here nothing is taken up."""
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
