"""What the calls of inference refuse: each message names the argument, and what would be right.

Sizes are always looked at, values on a CPU only: a GPU would have to finish its work first. A trace
has no values, and its sizes are symbols: nothing is checked in it.
"""

import operator
from collections.abc import Iterable, Sequence
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from gaugelasso.inference.padding import Side
from gaugelasso.models import SpecError, Transformer, TransformerSpec

TOKEN_DTYPES = (torch.int64, torch.int32)
SEEDS = 2**64


def check_transformer(name: str, model: object) -> None:
    """TypeError unless the model is the built-in transformer: no other has an inference form."""
    # What torch.compile returns passes on what is asked of it.
    if not isinstance(getattr(model, "_orig_mod", model), Transformer):
        raise TypeError(
            f"{name}: the model is a {type(model).__name__}; it needs the built-in transformer "
            "(gaugelasso.Transformer)"
        )


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """SpecError if an option is none of these words."""
    if value not in choices:
        raise SpecError(f"{name} = {value!r}: choose one of: {', '.join(map(str, choices))}")


def check_count(name: str, value: int) -> None:
    """SpecError if a number of things is below 1."""
    if value < 1:
        raise SpecError(f"{name} = {value}: must be at least 1")


def check_inputs(spec: TransformerSpec, inputs: Tensor) -> None:
    """SpecError unless a model reads inputs of this kind and size."""
    if torch.compiler.is_compiling():
        return
    tokens = spec.input_kind == "tokens"
    shape = list(inputs.shape)
    if tokens and len(shape) != 2:
        raise SpecError(f"the tokens have the shape {shape}; give [sequences, positions]")
    width = spec.inputs + (spec.input_kind == "masked_patches")  # whether a patch is hidden
    if not tokens and (len(shape) != 3 or shape[2] != width):
        raise SpecError(f"the patches have the shape {shape}; give [sequences, positions, {width}]")
    if 0 in shape:
        raise SpecError(
            f"the inputs of shape {shape} are empty; give at least one sequence of one position"
        )
    check_length(spec, shape[1])
    if tokens:
        check_token_dtype(inputs)


def check_length(spec: TransformerSpec, length: int) -> None:
    """SpecError if a sequence is longer than a model."""
    if length > spec.length:
        raise SpecError(
            f"a sequence of {length} positions is longer than the model's {spec.length}; shorten it"
        )


def check_token_dtype(tokens: Tensor) -> None:
    """SpecError unless an embedding takes tokens of this type."""
    if tokens.dtype not in TOKEN_DTYPES:
        raise SpecError(f"the tokens are {tokens.dtype}; give whole numbers: torch.int64")


def check_new_tokens(tokens: Tensor, batch: int) -> None:
    """SpecError unless there is one token for every sequence of a cache."""
    if tokens.shape != (batch,):
        raise SpecError(
            f"the tokens have the shape {list(tokens.shape)}; give one for each of the cache's "
            f"sequences: [{batch}]"
        )
    check_token_dtype(tokens)


def check_prompts(prompts: int, cached: int, rows: Tensor | None) -> None:
    """SpecError unless there is one prompt for every sequence of a cache that is filled."""
    if rows is None and prompts != cached:
        raise SpecError(
            f"{prompts} prompts for a cache of {cached} sequences; give one for each, or say with "
            "rows= which ones they fill"
        )
    if rows is not None and rows.shape != (prompts,):
        raise SpecError(f"rows has the shape {list(rows.shape)}; give one for each prompt: "
                        f"[{prompts}]")  # fmt: skip


def check_lengths(inputs: Tensor, lengths: Tensor | None, padding: Side) -> None:
    """SpecError unless every sequence has a length of 1 to the width of the inputs."""
    if torch.compiler.is_compiling():
        return
    check_choice("padding", padding, get_args(Side))
    if lengths is None:
        return
    batch, size = inputs.shape[:2]
    if not isinstance(lengths, Tensor):
        raise SpecError(f"lengths is a {type(lengths).__name__}; give a tensor: "
                        f"torch.tensor(lengths)")  # fmt: skip
    if lengths.shape != (batch,) or lengths.dtype not in TOKEN_DTYPES:
        raise SpecError(
            f"lengths has the shape {list(lengths.shape)} and is {lengths.dtype}; give one whole "
            f"number for each sequence: [{batch}], torch.int64"
        )
    if lengths.is_cpu:
        for row, length in enumerate(lengths.numpy()):
            if not 1 <= length <= size:
                raise SpecError(
                    f"lengths[{row}] = {length}: must be from 1 to {size}, the positions of the "
                    "inputs"
                )


def check_known(spec: TransformerSpec, tokens: Tensor) -> None:
    """SpecError if a model does not know all of these tokens."""
    unknown = tokens[(tokens < 0) | (tokens >= spec.inputs)]
    if len(unknown):
        raise SpecError(unknown_token(spec, int(unknown[0])))


def unknown_token(spec: TransformerSpec, token: object, where: str = "the inputs contain") -> str:
    """The message for a token that a model does not know."""
    return f"{where} token {token}; the model knows 0 to {spec.inputs - 1}"


def whole_number(value: object, what: str) -> int:
    """The value as an int; SpecError if it is no whole number."""
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise SpecError(f"{what} {value!r}; give whole numbers") from None


def prompt_tokens(spec: TransformerSpec, number: int, prompt: Any) -> Sequence[int]:
    """The tokens of a prompt: bytes, or any sequence, array or tensor of whole numbers."""
    if isinstance(prompt, str):
        raise SpecError(
            f"prompt {number} is a string; give its tokens, or for a model of bytes text.encode()"
        )
    values = prompt.tolist() if isinstance(prompt, Tensor | np.ndarray) else prompt
    if not isinstance(values, Iterable):
        raise SpecError(f"prompt {number} is {values!r}; give a sequence of tokens for each prompt")
    tokens = [whole_number(token, f"prompt {number} contains") for token in values]
    if not tokens:
        raise SpecError("the prompt is empty; give at least one token")
    for token in tokens:
        if not 0 <= token < spec.inputs:
            raise SpecError(unknown_token(spec, token, f"prompt {number} contains"))
    return tokens


def checked_seeds(seeds: Sequence[int] | None, prompts: int) -> list[int]:
    """One seed for each prompt; without them, the numbers of the prompts."""
    if seeds is None:
        return list(range(prompts))
    if len(seeds) != prompts:
        raise SpecError(f"{len(seeds)} seeds for {prompts} prompts; give one for each")
    checked = [whole_number(seed, "seeds contains") for seed in seeds]
    for seed in checked:
        if not 0 <= seed < SEEDS:
            raise SpecError(f"seeds contains {seed}: must be 0 or more and below 2**64")
    return checked
