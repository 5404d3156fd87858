"""Serving on a GPU: captured graphs, compiled kernels and no wait of the host. Needs a GPU.

python -m pytest tests/inference/test_gpu.py
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gaugelasso.inference import Form, InferenceModel, Sampling, compare, generate, tuned
from gaugelasso.kernels.tiles import DECODING, JOINED
from gaugelasso.models import Transformer, TransformerSpec
from tests.inference.test_generation import PROMPTS, plain, trained  # noqa: F401 (a fixture)
from tests.inference.test_model import deviation

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

RESULTS = Path(__file__).parents[2] / "results" / "charlm" / "main.json"
# Every form once, in the order of the stream that it is made for: each is compiled, which takes
# longer than the test.
FORMS = [
    (Form("gather", "scatter", "sdpa"), "tokens"),
    (Form("window", "window", "sdpa"), "tokens"),
    (Form("window", "window", "sdpa"), "sites"),
    (Form("fused", "fused", "narrow"), "tokens"),
    (Form("fused", "fused", "sdpa"), "sites"),
    (Form("scaled", "fused", "direct"), "sites"),
    (Form("staged", "fused", "cudnn"), "sites"),
    (Form("fused_window", "scatter", "direct"), "tokens"),
    (Form("staged_gated", "window", "narrow"), "tokens"),
    (Form("staged_gated", "fused", "narrow"), "sites"),
    (Form("scaled_window", "window", "narrow"), "tokens"),
]


@pytest.fixture(scope="module")
def language_model() -> Transformer:
    spec = TransformerSpec.from_dict(json.loads(RESULTS.read_text())["runs"][0]["structure"])
    return Transformer(spec).eval().to("cuda")


def tokens_of(model: Transformer, batch: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(batch)
    return torch.randint(model.spec().inputs, (batch, length), generator=generator).to("cuda")


@pytest.mark.parametrize(("form", "stream"), FORMS, ids=str)
@torch.inference_mode()
def test_every_form_computes_the_trained_model(
    language_model: Transformer, form: Form, stream: str
) -> None:
    for batch, length in ((2, 512), (3, 77), (40, 128)):
        tokens = tokens_of(language_model, batch, length)
        if batch < 40:
            single = InferenceModel(language_model, forms=form, stream=stream)  # type: ignore[arg-type]
            assert compare(single, language_model, tokens).largest < 1e-4
        half = InferenceModel(
            language_model, forms=form, stream=stream, dtype=torch.bfloat16  # type: ignore[arg-type]
        )  # fmt: skip
        assert compare(half, language_model, tokens).mean_square < 0.02
        # What a compiled kernel computes depends on nothing but its inputs.
        assert all(torch.equal(half(tokens), half(tokens)) for _ in range(5))


@pytest.mark.parametrize("stream", ["tokens", "sites"])
@torch.inference_mode()
def test_mlps_in_one_kernel_compute_the_trained_model(
    language_model: Transformer, stream: str
) -> None:
    """Of few tokens and of many. The tile is the one that fits the widest of them, in bfloat16."""
    [tile] = [tile for tile in JOINED if tile.stages == 1]
    served = InferenceModel(
        language_model, forms=Form("fused", "fused", "direct", joined=tile), stream=stream,  # type: ignore[arg-type]
        dtype=torch.bfloat16,
    )  # fmt: skip
    for batch, length in ((2, 100), (3, 277), (40, 128)):
        tokens = tokens_of(language_model, batch, length)
        assert compare(served, language_model, tokens).mean_square < 0.02
        assert all(torch.equal(served(tokens), served(tokens)) for _ in range(5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.inference_mode()
def test_graphs_replay_what_direct_calls_compute(
    language_model: Transformer, dtype: torch.dtype
) -> None:
    served = InferenceModel(language_model, dtype=dtype)
    captured = served.captured().reserve(3, 100)
    for seed in range(4):  # directly, captured, replayed
        for batch, length in ((3, 100), (5, 90)):
            tokens = tokens_of(language_model, batch, length).roll(seed, 1)
            expected = served(tokens)
            assert deviation(captured(tokens), expected) < (1e-4 if dtype is torch.float32 else 0.2)


WHOLE = Form("fused", "fused", "narrow", step="whole")
# In float32 the largest tile needs more shared memory than there is.
STEPS = [
    (Form("fused", "fused", "direct", attention_tile=tile), "tokens")
    for tile in (None, *DECODING[:-1])
]


@pytest.mark.parametrize(
    ("form", "stream"),
    [*STEPS, (WHOLE, "tokens"), (WHOLE, "sites")],
    ids=str,
)
@torch.inference_mode()
def test_decoding_agrees_with_whole_passes(
    language_model: Transformer, form: Form, stream: str
) -> None:
    tokens = tokens_of(language_model, 4, 60)
    whole = language_model(tokens)
    served = InferenceModel(language_model, forms=form, stream=stream)  # type: ignore[arg-type]
    cache = served.new_cache(4, 64)
    lengths = torch.tensor([50, 1, 33, 7], device="cuda")
    logits = served.prefill(tokens[:, :50], cache, lengths)
    rows = torch.arange(4, device="cuda")
    assert deviation(logits, whole[rows, lengths - 1]) < 1e-4
    for step in range(5):
        logits = served.decode(tokens[rows, lengths + step], cache, static=True)
        assert deviation(logits, whole[rows, lengths + step]) < 1e-4


def test_captured_texts_are_those_of_the_plain_decoder(trained: Transformer) -> None:  # noqa: F811
    served = InferenceModel(trained.to("cuda"))
    greedy = generate(served, PROMPTS, 30, sampling=Sampling(0), slide=True)
    again = generate(served, PROMPTS, 30, sampling=Sampling(0), slide=True)
    trained.to("cpu")
    assert greedy == again
    assert greedy == [plain(trained, prompt, 30, 0, temperature=0) for prompt in PROMPTS]


@pytest.mark.parametrize("sampling", [Sampling(0.9), Sampling(0.9, top_k=9, top_p=0.9)], ids=str)
def test_draws_do_not_depend_on_the_batch(
    trained: Transformer,  # noqa: F811
    sampling: Sampling,
) -> None:
    served = InferenceModel(trained.to("cuda"))
    together = generate(served, PROMPTS, 20, sampling=sampling, seeds=range(5), slide=True)
    alone = [
        generate(served, [prompt], 20, sampling=sampling, seeds=[seed], slide=True)[0]
        for seed, prompt in enumerate(PROMPTS)
    ]
    trained.to("cpu")
    assert together == alone


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@torch.inference_mode()
def test_the_host_does_not_wait(language_model: Transformer) -> None:
    """An operation that waits for the device raises in this mode."""
    captured = InferenceModel(language_model, dtype=torch.bfloat16).captured()
    tokens = tokens_of(language_model, 4, 64)
    with captured.decoder(4, 128, Sampling(0.9, top_p=0.9), 16) as decoder:
        decoder.begin_([1, 2, 3, 4], [10], 4)
        for _ in range(2):  # directly, and captured
            captured(tokens)
            decoder.prefill(tokens, torch.full((4,), 64, device="cuda"))
        decoder.rewind_()
        for step in range(3):
            decoder.cache.longest = 64 + step
            decoder.step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            captured(tokens)
            decoder.prefill(tokens, torch.full((4,), 64, device="cuda"))
            for _ in range(5):
                decoder.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@torch.inference_mode()
def test_one_kernel_per_operator_gives_the_same_each_time(language_model: Transformer) -> None:
    """Programs finish in any order, and what they add up does not depend on it."""
    served = InferenceModel(language_model, forms=WHOLE, dtype=torch.bfloat16)
    apart = replace(WHOLE, step="parts")
    parts = InferenceModel(language_model, forms=apart, dtype=torch.bfloat16)
    tokens = tokens_of(language_model, 33, 100)
    found = []
    for model in (parts, *[served] * 20):
        cache = model.new_cache(33, 128)
        model.prefill(tokens, cache)
        found.append(torch.stack([model.decode(tokens[:, i], cache) for i in range(4)]))
    assert all(torch.equal(each, found[1]) for each in found[2:])
    assert deviation(found[1], found[0]) < 0.3


@torch.inference_mode()
def test_a_tuned_model_has_the_same_outputs(language_model: Transformer) -> None:
    for batch, length in ((8, 512), (64, 1)):
        tokens = tokens_of(language_model, batch, length)
        served = tuned(language_model, tokens, dtype=torch.bfloat16)
        plainly = InferenceModel(language_model, dtype=torch.bfloat16, forms=Form())
        noise = compare(plainly, language_model, tokens).mean_square
        assert compare(served, language_model, tokens).mean_square < 2 * noise
