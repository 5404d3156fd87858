"""Decoding position by position gives the logits of a whole pass, for any structure."""

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from gaugelasso.kernels import reference_kernels
from gaugelasso.models import SpecError, Transformer, TransformerSpec
from gaugelasso.models.decoding import Decoder, sample
from tests.contract.models import (
    SEEDS,
    TRANSFORMERS,
    TWICE,
    Case,
    Row,
    difference,
    make,
    transformer,
)

ROWS = list({case.row.name: case.row for case in TRANSFORMERS}.values())
NAMES = {
    "rope", "rope_positions", "grouped_keys", "biases", "qk_norm", "qk_norm_no_rope", "gpt2",
    "write_biases", "tied_head",
}  # fmt: skip
CAUSAL = [row for row in ROWS if row.name in NAMES]
CAUSAL += [
    transformer("no_rope", rope=False, positions=True),
    transformer("tied", norm="tied", heads=4, kv_heads=1),
]
# As in the contract suite: other sizes concern what rows share.
CASES = [
    Case(row, dropped, seed)
    for row in CAUSAL
    for dropped in (False, True)
    for seed in (SEEDS if row.name in TWICE else SEEDS[:1])
]


# Rounding is that of the products, which cut models have too.
@pytest.mark.parametrize(
    ("case", "dtype", "within"),
    [(case, torch.float64, 1e-10) for case in CASES]
    + [(case, torch.float32, 1e-5) for case in CASES if case.dropped],
    ids=str,
)
def test_cached_and_uncached_logits_agree(case: Case, dtype: torch.dtype, within: float) -> None:
    model = make(case).to(dtype)
    tokens = case.row.inputs(model, torch.Generator().manual_seed(1))
    with torch.no_grad():
        whole = model(tokens)
    for prompt_length in range(1, tokens.shape[1]):
        decoder = Decoder(model)
        pieces = [decoder.feed(tokens[:, :prompt_length])]
        pieces += [
            decoder.feed(tokens[:, t : t + 1]) for t in range(prompt_length, tokens.shape[1])
        ]
        assert difference(torch.cat(pieces, dim=1), whole) < within


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("d_k", "d_v"), [(8, 8), (10, 11), (40, 40)])
def test_a_gpu_decodes_one_sequence_at_any_width(d_k: int, d_v: int) -> None:
    """One position of one sequence has odd strides at even widths; PyTorch checks them."""
    spec = TransformerSpec.uniform(
        width=16, layers=2, heads=2, d_k=d_k, d_v=d_v, d_f=8, length=6, inputs=9, outputs=9,
        positions=True,
    )  # fmt: skip
    model = Transformer(spec, seed=3).cuda().eval()
    tokens = torch.arange(6, device="cuda")[None]
    with torch.no_grad(), reference_kernels():
        whole = model(tokens)
    decoder = Decoder(model)
    pieces = [decoder.feed(tokens[:, t : t + 1]) for t in range(6)]
    assert difference(torch.cat(pieces, dim=1), whole) < 1e-4


def test_attention_gets_the_strides_of_its_shapes(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def look(*heads: Tensor, **rest: object) -> Tensor:
        seen.extend(heads)
        return attention(*heads, **rest)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", look)
    decoder = Decoder(model)
    for token in range(3):
        decoder.feed(torch.tensor([[token]]))
    assert [t.stride() for t in seen] == [torch.empty(t.shape).stride() for t in seen]
    assert len(seen) == 9


def test_the_cut_models_differ_between_layers() -> None:
    """Otherwise the tests above would not cover different widths."""
    cut = [make(case).spec() for case in CASES if case.dropped]
    shapes = [{(op.reads, op.writes) for op in spec.operators} for spec in cut]
    assert all(len(different) > 1 for different in shapes)


@pytest.mark.parametrize("row", [row for row in ROWS if row not in CAUSAL], ids=lambda r: r.name)
def test_models_that_cannot_generate_are_rejected(row: Row) -> None:
    with pytest.raises(SpecError, match="decoding needs a causal model over tokens"):
        Decoder(make(Case(row, dropped=False, seed=0)))


@pytest.fixture
def model() -> Transformer:
    spec = TransformerSpec.uniform(
        width=8, layers=1, heads=2, d_k=4, d_v=4, d_f=8, length=6, inputs=9, outputs=9,
        positions=True,
    )  # fmt: skip
    return Transformer(spec, seed=3).eval()


def test_the_prompt_is_fed_first_then_single_positions(model: Transformer) -> None:
    decoder = Decoder(model)
    decoder.feed(torch.tensor([[1, 2, 3]]))
    with pytest.raises(SpecError, match="got 2 positions; after the first feed"):
        decoder.feed(torch.tensor([[1, 2]]))
    for _ in range(3):
        decoder.feed(torch.tensor([[1]]))
    with pytest.raises(SpecError, match="position 7 is beyond the model's length of 6"):
        decoder.feed(torch.tensor([[1]]))


def greedy(model: Transformer, text: list[int]) -> Iterator[int]:
    """Without a cache: which tokens are read when the length is reached."""
    read = text if len(text) <= 6 else text[-3:]
    while True:
        with torch.no_grad():
            token = int(model(torch.tensor([read]))[0, -1].argmax())
        yield token
        text = [*text, token]
        read = text[-3:] if len(read) == 6 else [*read, token]


@pytest.mark.parametrize("prompt", [[4], [1, 2, 3, 4, 5, 6], list(range(9))], ids=len)
def test_a_text_may_be_longer_than_the_model(model: Transformer, prompt: list[int]) -> None:
    tokens = sample(model, prompt, temperature=0)
    expected = greedy(model, prompt)
    assert list(itertools.islice(tokens, 25)) == list(itertools.islice(expected, 25))


def drawn(model: Transformer, count: int = 60, seed: int = 0, **options: float) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    tokens = sample(model, [1], generator=generator, **options)  # type: ignore[arg-type]
    return list(itertools.islice(tokens, count))


def test_draws_follow_their_seed(model: Transformer) -> None:
    assert drawn(model) == drawn(model)
    assert drawn(model) != drawn(model, seed=1)


def test_temperature_and_top_k_narrow_the_choice(model: Transformer) -> None:
    with torch.no_grad():
        order = model(torch.tensor([[1]]))[0, -1].argsort(descending=True).tolist()
    seeds = {1: 10, 3: 60, 99: 200}
    firsts = {k: {drawn(model, 1, seed, top_k=k)[0] for seed in range(n)} for k, n in seeds.items()}
    assert firsts[1] == {order[0]}
    assert firsts[3] == set(order[:3])
    assert len(firsts[99]) > 6
    assert drawn(model, temperature=1e-30) == drawn(model, temperature=0) == drawn(model, top_k=1)


def test_prompt_and_temperature_are_checked(model: Transformer) -> None:
    with pytest.raises(SpecError, match="the prompt is empty"):
        sample(model, [])
    with pytest.raises(SpecError, match="temperature = nan"):
        sample(model, [1], temperature=float("nan"))
