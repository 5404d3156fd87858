"""Mistakes in calls of inference are named, with what would be right, and nothing is changed."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gaugelasso.export import fastest_on_cpu
from gaugelasso.inference import Captured, Form, InferenceModel, generate, tuned
from gaugelasso.models import SpecError, Transformer, TransformerSpec

SPEC = TransformerSpec.uniform(
    width=8, layers=1, heads=2, d_k=4, d_v=3, d_f=8, length=10, inputs=20, outputs=20
)
PROMPTS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])


@pytest.fixture(scope="module")
def served() -> InferenceModel:
    return InferenceModel(Transformer(SPEC, seed=3).eval())


LENGTHS = [
    (torch.tensor([4, 0]), "right", r"lengths\[1\] = 0: must be from 1 to 4"),
    (torch.tensor([4, -1]), "left", r"lengths\[1\] = -1: must be from 1 to 4"),
    (torch.tensor([5, 4]), "right", r"lengths\[0\] = 5: must be from 1 to 4"),
    ([4, 2], "right", r"lengths is a list; give a tensor: torch.tensor\(lengths\)"),
    (torch.tensor([4.0, 2.0]), "right", "is torch.float32; give one whole number"),
    (torch.tensor([4, 2, 1]), "right", r"shape \[3\] .* for each sequence: \[2\]"),
    (torch.tensor([4, 2]), "lft", "padding = 'lft': choose one of: left, right"),
    (torch.tensor([4, 2]), "LEFT", "padding = 'LEFT'"),
    (torch.tensor([4, 2]), None, "padding = None"),
    (None, "lft", "padding = 'lft'"),
]


@pytest.mark.parametrize(("lengths", "padding", "message"), LENGTHS)
@torch.inference_mode()
def test_lengths_and_padding(
    served: InferenceModel, lengths: Any, padding: Any, message: str
) -> None:
    cache = served.new_cache(2)
    calls: list[Callable[..., object]] = [
        lambda *rest, **options: served.prefill(PROMPTS, cache, *rest, **options),
        lambda *rest, **options: served(PROMPTS, *rest, last=True, **options),
        lambda *rest, **options: Captured(served, gpu=True)(PROMPTS, *rest, **options),
    ]
    for call in calls:
        with pytest.raises(SpecError, match=message):
            call(lengths, padding=padding)
    assert cache.positions.tolist() == [0, 0]
    assert not any(keys.any() for keys in cache.keys)


@pytest.mark.parametrize("token", [-1, 20])
@torch.inference_mode()
def test_unknown_tokens(served: InferenceModel, token: int) -> None:
    message = f"the inputs contain token {token}; the model knows 0 to 19"
    tokens = PROMPTS.clone()
    tokens[1, 2] = token
    cache = served.new_cache(2)
    for call in (served, lambda each: served.prefill(each, cache), Captured(served, gpu=True)):
        with pytest.raises(SpecError, match=message):
            call(tokens)
    for by_numpy in (False, True):
        alone = served.new_cache(1)
        served.prefill(PROMPTS[:1], alone)
        assert served.step_by_numpy_(by_numpy) == by_numpy
        with pytest.raises(SpecError, match=message):
            served.decode(torch.tensor([token]), alone)
        assert alone.positions.tolist() == [4]
    served.step_by_numpy_(False)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (PROMPTS[0], r"shape \[4\]; give \[sequences, positions\]"),
        (PROMPTS[:0], r"inputs of shape \[0, 4\] are empty; give at least one"),
        (PROMPTS[:, :0], r"inputs of shape \[2, 0\] are empty"),
        (PROMPTS.float(), "tokens are torch.float32; give whole numbers: torch.int64"),
        (PROMPTS.to(torch.uint8), "tokens are torch.uint8"),
        (PROMPTS.repeat(1, 3), "a sequence of 12 positions is longer than the model's 10"),
    ],
)
@torch.inference_mode()
def test_inputs_of_another_size_or_kind(
    served: InferenceModel, inputs: torch.Tensor, message: str
) -> None:
    model, cache = Transformer(SPEC).eval(), served.new_cache(2)
    calls: list[Callable[[torch.Tensor], object]] = [
        served,
        Captured(served, gpu=True),
        lambda each: served.prefill(each, cache),
        lambda each: tuned(model, each),
    ]
    for call in calls:
        with pytest.raises(SpecError, match=message):
            call(inputs)


def test_patches_of_another_width() -> None:
    spec = TransformerSpec.uniform(
        width=8, layers=1, heads=2, d_k=4, d_v=3, d_f=8, length=4, inputs=6, outputs=6,
        input_kind="patches", causal=False,
    )  # fmt: skip
    served = InferenceModel(Transformer(spec).eval())
    assert served(torch.zeros(2, 4, 6)).shape == (2, 4, 6)
    with pytest.raises(SpecError, match=r"shape \[2, 4, 5\]; give \[sequences, positions, 6\]"):
        served(torch.zeros(2, 4, 5))


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (PROMPTS[:, :1], r"shape \[2, 1\]; give one for each of the cache's sequences: \[2\]"),
        (PROMPTS[:1, 0], r"shape \[1\]; give one for each of the cache's sequences: \[2\]"),
        (PROMPTS[:, 0].float(), "tokens are torch.float32"),
    ],
)
@torch.inference_mode()
def test_new_tokens(served: InferenceModel, tokens: torch.Tensor, message: str) -> None:
    cache = served.new_cache(2)
    served.prefill(PROMPTS, cache)
    with pytest.raises(SpecError, match=message):
        served.decode(tokens, cache)
    assert cache.positions.tolist() == [4, 4]


@torch.inference_mode()
def test_prompts_that_do_not_fit_a_cache(served: InferenceModel) -> None:
    cache = served.new_cache(3)
    with pytest.raises(SpecError, match=r"2 prompts for a cache of 3 sequences; .* rows="):
        served.prefill(PROMPTS, cache)
    with pytest.raises(SpecError, match=r"rows has the shape \[1\]; .* for each prompt: \[2\]"):
        served.prefill(PROMPTS, cache, rows=torch.tensor([1]))
    served.prefill(PROMPTS, cache, rows=torch.tensor([2, 0]))
    assert cache.positions.tolist() == [4, 0, 4]


@pytest.mark.parametrize(("batch", "length"), [(-2, 6), (0, 6), (6, -1), (6, 0)])
def test_sizes(served: InferenceModel, batch: int, length: int) -> None:
    name, value = ("batch", batch) if batch < 1 else ("length", length)
    for call in (served.new_cache, served.captured().reserve):
        with pytest.raises(SpecError, match=f"{name} = {value}: must be at least 1"):
            call(batch, length)


@pytest.mark.parametrize("part", ["read", "write", "attention", "step"])
def test_forms(part: str) -> None:
    with pytest.raises(SpecError, match=f"{part} = 'gathr': choose one of: "):
        Form(**{part: "gathr"})
    with pytest.raises(SpecError, match="stream = 'site': choose one of: tokens, sites"):
        InferenceModel(Transformer(SPEC), stream="site")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (["ab"], r"prompt 0 is a string; give its tokens, or .* text.encode\(\)"),
        (b"ab", "prompt 0 is 97; give a sequence of tokens for each prompt"),
        ([[1], [1.5]], "prompt 1 contains 1.5; give whole numbers"),
        ([np.array([1.0])], "prompt 0 contains 1.0"),
        ([torch.tensor([[1]])], r"prompt 0 contains \[1\]"),
        (torch.tensor([1, 2]), "prompt 0 is 1; give a sequence"),
        (np.array([[1, 20]]), "prompt 0 contains token 20; the model knows 0 to 19"),
    ],
)
def test_prompts_that_are_no_tokens(served: InferenceModel, prompts: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        generate(served, prompts, 3)


def test_prompts_may_be_arrays_and_tensors(served: InferenceModel) -> None:
    expected = generate(served, [[1, 2], [3, 4]], 4)
    tensor = torch.tensor([[1, 2], [3, 4]])
    for prompts in (tensor, tensor.numpy(), list(tensor), [tensor[0].int(), tensor[1].numpy()]):
        assert generate(served, prompts, 4) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seeds": [-1]}, "seeds contains -1: must be 0 or more"),
        ({"seeds": [2**64]}, "seeds contains 18446744073709551616: must be 0 or more and below"),
        ({"seeds": [1.5]}, "seeds contains 1.5; give whole numbers"),
        ({"stop": ["."]}, "stop contains '.'; give whole numbers"),
    ],
)
def test_seeds_and_stops(served: InferenceModel, options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        generate(served, [[1]], 3, **options)


@pytest.mark.parametrize("call", [InferenceModel, tuned, fastest_on_cpu])
def test_another_model_has_no_inference_form(call: Callable[..., Any]) -> None:
    given = (nn.Linear(2, 2), *([torch.zeros(1, 2)] if call is not InferenceModel else []))
    with pytest.raises(TypeError, match="the model is a Linear; it needs the built-in transformer"):
        call(*given)
