"""Generation: the tokens of the plain decoder, in batches, with stop tokens and sliding texts."""

import itertools
from collections.abc import Sequence

import pytest
import torch

from gaugelasso.errors import UserError
from gaugelasso.inference import InferenceModel, Sampling, generate, generate_blocks
from gaugelasso.inference.sampling import refresh_
from gaugelasso.models import Transformer, TransformerSpec
from gaugelasso.models.decoding import sample


@pytest.fixture(scope="module")
def trained() -> Transformer:
    spec = TransformerSpec.uniform(
        width=8, layers=2, heads=2, d_k=4, d_v=3, d_f=8, length=10, inputs=20, outputs=20,
        positions=True,
    )  # fmt: skip
    model = Transformer(spec, seed=3).eval()
    with torch.no_grad():  # else all tokens are almost equally likely
        model.classifier.out *= 5
    return model


@pytest.fixture(scope="module")
def served(trained: Transformer) -> InferenceModel:
    return InferenceModel(trained)


def plain(
    model: Transformer, prompt: Sequence[int], count: int, seed: int, **options: float
) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    tokens = sample(model, prompt, generator=generator, **options)  # type: ignore[arg-type]
    return list(itertools.islice(tokens, count))


PROMPTS = [[1], [4, 5, 6], list(range(10)), list(range(17)), [2, 3]]


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0}, {"temperature": 0.5, "top_k": 3}, {"temperature": 1e-30}],
    ids=["plain", "greedy", "top_k", "cold"],
)
def test_a_batch_gives_the_tokens_of_the_plain_decoder(
    trained: Transformer, served: InferenceModel, options: dict[str, float]
) -> None:
    """Also beyond the model's length, at which the sequences arrive at different steps."""
    sampling = Sampling(**options)  # type: ignore[arg-type]
    rows = generate(served, PROMPTS, 30, sampling=sampling, seeds=range(5), slide=True)
    expected = [plain(trained, prompt, 30, seed, **options) for seed, prompt in enumerate(PROMPTS)]
    assert rows == expected


def test_models_of_length_one_to_three_slide(trained: Transformer) -> None:
    for length in (1, 2, 3):
        spec = TransformerSpec.uniform(
            width=8, layers=1, heads=2, d_k=4, d_v=3, d_f=8, length=length, inputs=9, outputs=9
        )
        model = Transformer(spec, seed=3).eval()
        rows = generate(InferenceModel(model), [[1, 2], [3]], 8, seeds=[5, 6], slide=True)
        assert rows == [plain(model, [1, 2], 8, 5), plain(model, [3], 8, 6)]


def test_a_sequence_does_not_depend_on_the_others(served: InferenceModel) -> None:
    together = generate(served, [[1], [2, 3]], 8, seeds=[7, 8])
    first = generate(served, [[1]], 8, seeds=[7])
    second = generate(served, [[2, 3]], 8, seeds=[8])
    assert together == first + second
    assert generate(served, [[1], [1]], 8, seeds=[7, 7]) == first * 2
    different = generate(served, [[1]] * 4, 9)
    assert len(set(map(tuple, different))) > 1


def test_a_stop_token_is_the_last(served: InferenceModel) -> None:
    free = generate(served, [[1], [4]], 9, seeds=[1, 2])
    stop = free[0][3]
    rows = generate(served, [[1], [4]], 9, seeds=[1, 2], stop=[stop, 19])
    for row, without in zip(rows, free, strict=True):
        ends = [at for at, token in enumerate(without) if token in (stop, 19)]
        assert row == (without[: ends[0] + 1] if ends else without)
    assert len(rows[0]) <= 4


def test_generation_ends_with_the_last_sequence(served: InferenceModel) -> None:
    free = generate(served, [[1]], 9, seeds=[1])[0]
    blocks = list(generate_blocks(served, [[1]], 9, seeds=[1], stop=free[:1], block=2))
    assert [block.tolist() for block in blocks] == [[[free[0], -1]]]
    sizes = [block.shape[1] for block in generate_blocks(served, [[1]], 9, block=4)]
    assert sizes == [4, 4, 1]


def test_the_host_asks_the_device_once_in_a_block(
    served: InferenceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that would wait for a GPU: no value of a tensor is used between blocks."""
    asked = []
    for name in ("item", "tolist", "__bool__", "__int__", "cpu"):
        method = getattr(torch.Tensor, name)

        def spy(self: torch.Tensor, *rest: object, method=method, name=name) -> object:  # type: ignore[no-untyped-def]
            asked.append(name)
            return method(self, *rest)

        monkeypatch.setattr(torch.Tensor, name, spy)
    list(generate_blocks(served, [[1], [2, 3, 4]], 8, stop=[], slide=True, block=4))
    assert asked == ["cpu", "__bool__", "cpu"]


def test_draws_are_those_of_multinomial() -> None:
    probabilities = torch.rand(3, 50, generator=torch.Generator().manual_seed(0)).softmax(1)
    generators = [torch.Generator().manual_seed(seed) for seed in range(3)]
    noise = torch.empty(3, 50)
    refresh_(noise, generators)
    drawn = Sampling().draw(probabilities.log(), noise).tolist()
    assert drawn == [
        int(torch.multinomial(row, 1, generator=torch.Generator().manual_seed(seed)))
        for seed, row in enumerate(probabilities)
    ]


def test_top_p_keeps_the_fewest_that_suffice() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.05, 0.15, 0.3, 0.5]]).log()
    for top_p, kept in ((0.4, 1), (0.5, 1), (0.6, 2), (0.9, 3), (0.96, 4), (1.0, 4)):
        left = Sampling(top_p=top_p - 1e-6 if top_p < 1 else 1.0).probabilities(logits)
        assert (left > 0).sum(1).tolist() == [kept, kept]
        assert (left[0] > 0).tolist() == (left[1] > 0).tolist()[::-1]
    # After the temperature: a flatter distribution needs more tokens.
    assert int((Sampling(temperature=5, top_p=0.6).probabilities(logits) > 0).sum()) == 6


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "there are no prompts"),
        ([[1], []], {}, "the prompt is empty"),
        ([[1], [20]], {}, "prompt 1 contains token 20; the model knows 0 to 19"),
        ([[1, 2]], {}, "2 tokens with 10 new ones needs 11 positions, and the model has 10"),
        ([[1]], {"seeds": [1, 2]}, "2 seeds for 1 prompts"),
    ],
)  # fmt: skip
def test_mistakes_are_named(
    served: InferenceModel, prompts: list[list[int]], options: dict, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        generate(served, prompts, 10, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": float("nan")}, "temperature = nan: must be 0 or more"),
        ({"top_k": -1}, "top_k = -1: must be 0"),
        ({"top_p": 0.0}, "top_p = 0.0: must be above 0 and at most 1"),
    ],
)
def test_settings_are_checked(options: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Sampling(**options)  # type: ignore[arg-type]
