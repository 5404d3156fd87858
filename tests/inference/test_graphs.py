"""Buckets, padding and draws of captured inference, with direct calls in place of graphs."""

import itertools

import pytest
import torch

from gaugelasso.errors import UserError
from gaugelasso.inference import (
    Captured,
    Form,
    InferenceModel,
    Sampling,
    generate,
    generate_blocks,
    graphs,
    tuning,
)
from gaugelasso.inference.noise import exponential_
from gaugelasso.models import Transformer
from tests.contract.models import Case, make
from tests.inference.cases import CASES
from tests.inference.test_generation import PROMPTS, plain, trained  # noqa: F401 (a fixture)
from tests.inference.test_model import WITHIN, deviation, inputs_of

# Calculated with whole numbers of Python.
KNOWN = [0.12407809680, 0.84042280689, 3.63311307515]
DROPPED = [case for case in CASES if case.dropped and case.seed == 0]


def as_on_gpu(model: Transformer, **options: object) -> InferenceModel:
    served = InferenceModel(model, align=16, **options)  # type: ignore[arg-type]
    served._captured = Captured(served, gpu=True)
    return served


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("case", DROPPED, ids=str)
@torch.inference_mode()
def test_padding_to_a_bucket_changes_no_output(case: Case, padding: str) -> None:
    model = make(case)
    inputs = torch.cat([inputs_of(case, model)] * 2)[:3]
    size = inputs.shape[1]
    served = as_on_gpu(model, dtype=torch.float64)
    captured = served.captured()
    assert captured.bucket(3, size)[0] == 4
    # A call before it with other values: nothing of it may be left.
    captured(torch.flip(inputs, (0,)).roll(1, 1), last=True)
    assert deviation(captured(inputs), model(inputs)) < WITHIN[torch.float64]
    assert deviation(captured(inputs[:1, :-1]), model(inputs[:1, :-1])) < WITHIN[torch.float64]
    lengths = torch.tensor([size, 1, size - 1])
    expected = served(inputs, lengths, padding=padding, last=True)  # type: ignore[arg-type]
    got = captured(inputs, lengths, padding=padding, last=True)  # type: ignore[arg-type]
    assert deviation(got, expected) < WITHIN[torch.float64]


@pytest.mark.parametrize("case", DROPPED, ids=str)
@torch.inference_mode()
def test_widths_padded_with_zeros_change_no_output(case: Case) -> None:
    model = make(case)
    inputs = inputs_of(case, model)
    whole, unpadded = model(inputs), InferenceModel(model, dtype=torch.float64)
    maps = [("gather", "scatter"), ("window", "window"), ("gather", "spread")]
    layouts = [(8, "tokens"), (16, "sites")]
    for way, attention, (align, stream) in itertools.product(maps, ["sdpa", "narrow"], layouts):
        form = Form(*way, attention)  # type: ignore[arg-type]
        served = InferenceModel(model, dtype=torch.float64, forms=form, align=align, stream=stream)  # type: ignore[call-arg]
        assert served.width % align == 0
        assert deviation(served(inputs), whole) < WITHIN[torch.float64], (form, align)
        for part in served.readers().values():
            assert part.read.maps.values.shape[1] % align == 0
        if served.generates:  # and the cache holds no padding
            assert served.cache_bytes_per_token == unpadded.cache_bytes_per_token
            cache = served.new_cache(2)
            served.prefill(inputs[:, :2], cache)
            assert deviation(served.decode(inputs[:, 2], cache), model(inputs)[:, 2]) < 1e-11


def test_buckets_are_powers_of_two_up_to_the_model_and_what_is_reserved(
    trained: Transformer,  # noqa: F811
) -> None:
    captured = Captured(InferenceModel(trained), gpu=True)
    sizes = [(1, 1), (3, 5), (4, 8), (96, 9), (5, 10)]
    found = [captured.bucket(*size) for size in sizes]
    assert found == [(1, 1), (4, 8), (4, 8), (128, 10), (8, 10)]
    captured.reserve(96, 9)
    assert captured.bucket(96, 9) == (96, 9)
    assert captured.bucket(95, 9) == (128, 10)
    with pytest.raises(UserError, match="11 positions is longer than the model's 10"):
        captured.reserve(1, 11)
    assert Captured(InferenceModel(trained)).bucket(3, 5) == (3, 5)  # a CPU has no graphs
    with pytest.raises(UserError, match="limit = 0: at least one graph"):
        Captured(InferenceModel(trained), limit=0)


@torch.inference_mode()
def test_the_least_recently_used_graph_is_dropped(
    trained: Transformer,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = []

    class Counted(graphs._Pass):
        def __init__(self, *rest: object):
            made.append(rest[1])
            super().__init__(*rest)  # type: ignore[arg-type]

    monkeypatch.setattr(graphs, "_Pass", Counted)
    captured = Captured(InferenceModel(trained), gpu=True, limit=2)
    for batch in (1, 2, 1, 3, 1, 2):
        captured(torch.zeros(batch, 8, dtype=torch.long))
    assert made == [(1, 8), (2, 8), (4, 8), (2, 8)]


@torch.inference_mode()
def test_a_result_survives_the_next_call(trained: Transformer) -> None:  # noqa: F811
    captured = Captured(InferenceModel(trained), gpu=True)
    first = captured(torch.zeros(2, 4, dtype=torch.long))
    kept = first.clone()
    captured(torch.ones(2, 4, dtype=torch.long))
    assert torch.equal(first, kept)


def test_greedy_texts_in_buckets_are_those_of_the_plain_decoder(
    trained: Transformer,  # noqa: F811
) -> None:
    """Five prompts of unequal lengths in a bucket of eight, also beyond the model's length."""
    served = as_on_gpu(trained)
    rows = generate(served, PROMPTS, 30, sampling=Sampling(0), slide=True)
    assert rows == [plain(trained, prompt, 30, 0, temperature=0) for prompt in PROMPTS]


def test_draws_from_a_counter_do_not_depend_on_the_batch(
    trained: Transformer,  # noqa: F811
) -> None:
    served = as_on_gpu(trained)
    sampling = Sampling(0.9, top_k=9, top_p=0.95)
    seeds = [7, 2**63 - 1, 3, 4, 5]
    together = generate(served, PROMPTS, 20, sampling=sampling, seeds=seeds, slide=True)
    alone = [
        generate(served, [prompt], 20, sampling=sampling, seeds=[seed], slide=True)[0]
        for prompt, seed in zip(PROMPTS, seeds, strict=True)
    ]
    assert together == alone
    again = generate(served, [[1]] * 3, 9, seeds=[7, 8, 7])
    assert again[0] == again[2] != again[1]


def test_stop_tokens_and_texts_side_by_side(trained: Transformer) -> None:  # noqa: F811
    """Two texts of one size at a time do not share a cache; a stop token ends its own."""
    served = as_on_gpu(trained)
    free = generate(served, [[1], [4], [5]], 9, seeds=[1, 2, 3])
    one = generate_blocks(served, [[1], [4], [5]], 9, seeds=[1, 2, 3], block=2)
    other = generate_blocks(served, [[2], [3], [5]], 9, seeds=[4, 5, 6], block=2)
    pairs = list(itertools.zip_longest(one, other))
    assert torch.cat([first for first, _ in pairs], 1).tolist() == free
    stop = free[0][2]
    rows = generate(served, [[1], [4], [5]], 9, seeds=[1, 2, 3], stop=[stop, 10**6])
    for row, without in zip(rows, free, strict=True):
        ends = [at for at, token in enumerate(without) if token == stop]
        assert row == (without[: ends[0] + 1] if ends else without)


def test_noise_is_exponential_and_known() -> None:
    """A change of these numbers would change what a seed gives."""
    noise = torch.empty(4, 50_000, dtype=torch.float64)
    exponential_(noise, torch.tensor([0, 1, 2, 0]), torch.tensor([0, 0, 0, 1]))
    assert noise.min() > 0
    for row in noise:
        assert abs(row.mean() - 1) < 0.02
        assert abs(row.var() - 2 + 1) < 0.05
        assert abs((row < 0.6931472).double().mean() - 0.5) < 0.01
    correlation = torch.corrcoef(noise) - torch.eye(4)
    assert correlation.abs().max() < 0.02
    assert noise[0, :3].tolist() == pytest.approx(KNOWN, rel=1e-6)


@torch.inference_mode()
def test_tuning_for_a_gpu_takes_the_faster_order(
    trained: Transformer,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        tuning, "graph_times", lambda ways, _: dict(zip(ways, (2.0, 1.0), strict=True))
    )
    tokens = torch.arange(10)[None]
    served = tuning._tuned_for_gpu(trained, tokens, torch.float32, False, 1)
    assert served.embedding.order == "sites"
    assert deviation(served(tokens), trained(tokens)) < 1e-4
