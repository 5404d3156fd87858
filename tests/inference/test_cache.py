"""With a cache the logits are those of a whole pass, for sequences of unequal length."""

import itertools

import pytest
import torch

from gaugelasso.errors import UserError
from gaugelasso.inference import Form, InferenceModel
from tests.contract.models import Case, make
from tests.inference.cases import CASES, GENERATIVE
from tests.inference.test_model import WITHIN, deviation, inputs_of


# Rounding is that of the products, which cut models have too.
@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, torch.float64) for case in GENERATIVE]
    + [(case, torch.float32) for case in GENERATIVE if case.dropped],
    ids=str,
)
@torch.inference_mode()
def test_cached_and_uncached_logits_agree(case: Case, dtype: torch.dtype) -> None:
    """With a cache that grows and with a static one, after a prompt of any length."""
    model = make(case)
    tokens = inputs_of(case, model)
    whole = model(tokens)
    served = InferenceModel(model, dtype=dtype)
    for static, prompt in itertools.product((False, True), range(1, tokens.shape[1])):
        cache = served.new_cache(len(tokens))
        assert deviation(served.prefill(tokens[:, :prompt], cache), whole[:, prompt - 1]) < 1e-4
        for at in range(prompt, tokens.shape[1]):
            logits = served.decode(tokens[:, at], cache, static=static)
            assert deviation(logits, whole[:, at]) < WITHIN[dtype], (static, prompt, at)
        assert cache.positions.tolist() == [tokens.shape[1]] * len(tokens)


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("attention", ["sdpa", "blocks"])
@pytest.mark.parametrize("case", [case for case in GENERATIVE if case.dropped], ids=str)
@torch.inference_mode()
def test_prompts_of_unequal_length(case: Case, attention: str, padding: str) -> None:
    model = make(case)
    tokens = torch.cat([inputs_of(case, model)] * 2)
    lengths = torch.tensor([1, 2, 3, 2])
    prompts = torch.zeros(4, 3, dtype=torch.long)
    for row, length in enumerate(lengths.tolist()):
        part = slice(0, length) if padding == "right" else slice(3 - length, 3)
        prompts[row, part] = tokens[row, :length]
    served = InferenceModel(model, dtype=torch.float64, forms=Form(attention=attention))  # type: ignore[arg-type]
    cache = served.new_cache(4)
    logits = served.prefill(prompts, cache, lengths, padding=padding)
    whole = model(tokens)
    rows = torch.arange(4)
    assert deviation(logits, whole[rows, lengths - 1]) < 1e-12
    logits = served.decode(tokens[rows, lengths], cache)
    assert deviation(logits, whole[rows, lengths]) < 1e-12
    assert cache.positions.tolist() == [2, 3, 4, 3]


@torch.inference_mode()
def test_some_sequences_of_a_cache_are_filled_again() -> None:
    case = GENERATIVE[0]
    model = make(case)
    tokens = torch.cat([inputs_of(case, model)] * 2)
    served = InferenceModel(model, dtype=torch.float64)
    cache = served.new_cache(4)
    served.prefill(tokens[:, :3], cache)
    again = served.prefill(tokens[[2, 0], 1:3], cache, rows=torch.tensor([3, 1]))
    assert deviation(again, model(tokens[[2, 0], 1:3])[:, -1]) < 1e-12
    assert cache.positions.tolist() == [3, 2, 3, 2]
    logits = served.decode(tokens[:, 3], cache)
    assert deviation(logits[0], model(tokens[:1, :4])[0, -1]) < 1e-12
    third = torch.cat([tokens[2, 1:3], tokens[3, 3:4]])[None]
    assert deviation(logits[3], model(third)[0, -1]) < 1e-12


@pytest.mark.parametrize("case", GENERATIVE, ids=str)
@torch.inference_mode()
def test_the_functional_form_takes_tokens_in_pieces(case: Case) -> None:
    """With padding on the left, in pieces of one, two and the other tokens."""
    model = make(case)
    tokens = inputs_of(case, model)
    whole = model(tokens)
    served = InferenceModel(model, dtype=torch.float64, forms=Form(write="spread"))
    size = tokens.shape[1]
    padded = torch.cat([torch.zeros(2, 2, dtype=torch.long), tokens], 1)
    positions = (torch.arange(size + 2) - 2).clamp(min=0).expand(2, -1)
    mask = (torch.arange(size + 2) >= 2).expand(2, -1)
    past, logits = served.empty_past(2), []
    for start, stop in ((0, 3), (3, 5), (5, size + 2)):
        part = slice(start, stop)
        new, past = served.forward_past(padded[:, part], positions[:, part], mask[:, :stop], past)
        logits.append(new)
    assert deviation(torch.cat(logits, 1)[:, 2:], whole) < 1e-12
    assert past[0][0].shape[2] == size + 2


@torch.inference_mode()
def test_a_full_cache_is_refused_with_both_numbers() -> None:
    case = GENERATIVE[0]
    served = InferenceModel(make(case))
    cache = served.new_cache(1, 3)
    token = torch.zeros(1, dtype=torch.long)
    served.prefill(token[:, None].expand(1, 3), cache)
    with pytest.raises(UserError, match="position 4 is beyond the cache's length of 3"):
        served.decode(token, cache)


@pytest.mark.parametrize("case", [c for c in CASES if c not in GENERATIVE], ids=str)
def test_models_that_cannot_generate_have_no_cache(case: Case) -> None:
    with pytest.raises(UserError, match="decoding needs a causal model over tokens"):
        InferenceModel(make(case)).new_cache(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_memory_of_a_token_is_told(dtype: torch.dtype) -> None:
    case = next(case for case in GENERATIVE if case.row.name == "grouped_keys" and case.dropped)
    model = make(case)
    served = InferenceModel(model, dtype=dtype)
    numbers = sum(
        op.kv_heads * (2 * op.keys + op.values)
        for op in model.spec().operators
        if op.kind == "attention"
    )
    assert served.cache_bytes_per_token == numbers * dtype.itemsize
    assert served.new_cache(3, 4).bytes == 3 * 4 * served.cache_bytes_per_token


@torch.inference_mode()
def test_a_cache_knows_whether_its_sequences_are_equally_long() -> None:
    """Then a step needs no mask; with static shapes nothing depends on it."""
    case = GENERATIVE[0]
    served = InferenceModel(make(case), dtype=torch.float64)
    tokens = inputs_of(case, make(case))
    cache = served.new_cache(2)
    assert cache.new_tokens().equal == 0
    served.prefill(tokens[:, :2], cache)
    at = cache.new_tokens()
    assert (at.seen, at.equal, at.mask) == (3, 2, None)
    fixed = cache.new_tokens(static=True)
    assert (fixed.seen, fixed.equal) == (cache.length, None)
    assert fixed.mask is not None
    assert fixed.mask.sum().item() == 2 * 3
    served.prefill(tokens[:, :2], cache, torch.tensor([2, 1]))
    uneven = cache.new_tokens()
    assert uneven.equal is None
    assert uneven.mask is not None
    assert uneven.mask[:, 0, 0].sum(1).tolist() == [3, 2]
    assert cache.new_tokens(kernels=True).mask is None
    cache.hold_(2)
    assert cache.new_tokens().equal == 2
    assert cache.positions.tolist() == [2, 2]
    served.prefill(tokens[:1, :1], cache, rows=torch.tensor([1]))
    assert cache.new_tokens().equal is None
