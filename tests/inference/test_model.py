"""The inference form computes what the trained model computes, in every form and precision."""

import itertools

import pytest
import torch
from torch import Tensor

from gaugelasso.errors import UserError
from gaugelasso.inference import Form, InferenceModel
from gaugelasso.inference.attention import BLOCK
from gaugelasso.models import Transformer, TransformerSpec
from tests.contract.models import Case, make
from tests.inference.cases import CASES, GENERATIVE, without_operators

FORMS = [
    Form(read, write, attention)  # type: ignore[arg-type]
    for (read, write), attention in itertools.product(
        [("gather", "scatter"), ("window", "window"), ("gather", "spread")], ["sdpa", "blocks"]
    )
]
# Those of a GPU, which elsewhere compute the same without kernels.
GPU_FORMS = [Form("fused_window", "fused", "direct"), Form("staged", "fused", "narrow")]
# Relative to the spread of the logits.
WITHIN = {torch.float64: 1e-12, torch.float32: 1e-4}


def deviation(new: Tensor, old: Tensor) -> float:
    """The largest deviation, relative to the spread of the values."""
    return float((new.double() - old.double()).abs().max() / old.double().std().clamp(min=1e-9))


def inputs_of(case: Case, model: Transformer) -> Tensor:
    return case.row.inputs(model, torch.Generator().manual_seed(1))


@pytest.mark.parametrize("case", CASES, ids=str)
@torch.inference_mode()
def test_outputs_are_the_trained_models(case: Case) -> None:
    model = make(case)
    inputs = inputs_of(case, model)
    whole = model(inputs)
    # Rounding is that of the products, which cut models have too.
    dtypes = (torch.float64, torch.float32) if case.dropped else (torch.float64,)
    for form, dtype in itertools.product(FORMS, dtypes):
        served = InferenceModel(model, dtype=dtype, forms=form)
        assert served.dtype == dtype
        assert deviation(served(inputs), whole) < WITHIN[dtype], form


@torch.inference_mode()
def test_torch_compile_makes_one_graph_of_it() -> None:
    """After a break each operator would be a graph of its own, and of many few are compiled."""
    sizes = {"heads": 2, "d_k": 4, "d_v": 4, "d_f": 8, "inputs": 9, "outputs": 9}
    spec = TransformerSpec.uniform(width=8, layers=1, length=BLOCK + 1, **sizes)
    served = InferenceModel(Transformer(spec), forms=Form("gather", "scatter", "blocks"))
    tokens = torch.randint(9, (2, BLOCK + 1))
    compiled = torch.compile(served, fullgraph=True, backend="eager")
    assert deviation(compiled(tokens), served(tokens)) < 1e-5


@pytest.mark.parametrize("form", GPU_FORMS, ids=str)
@pytest.mark.parametrize("case", [case for case in CASES if case.seed == 0], ids=str)
@torch.inference_mode()
def test_padded_widths_change_no_output(case: Case, form: Form) -> None:
    """In whole sequences, with a cache, and with a past."""
    model = make(case)
    inputs = inputs_of(case, model)
    served = InferenceModel(model, dtype=torch.float64, forms=form, align=16)
    whole = model(inputs)
    assert deviation(served(inputs), whole) < 1e-12
    if not served.generates:
        return
    cache = served.new_cache(len(inputs))
    for width, tensor in zip(served.cache_widths(), cache.keys, strict=True):
        assert tensor.shape[3] == width[1]  # without padding
    served.prefill(inputs[:, :2], cache)
    assert deviation(served.decode(inputs[:, 2], cache), whole[:, 2]) < 1e-12
    at = torch.arange(3).expand(len(inputs), -1)
    mask = torch.ones_like(at, dtype=torch.bool)
    _, past = served.forward_past(
        inputs[:, :2], at[:, :2], mask[:, :2], served.empty_past(len(inputs))
    )
    logits, _ = served.forward_past(inputs[:, 2:3], at[:, 2:], mask, past)
    assert deviation(logits[:, 0], whole[:, 2]) < 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@torch.inference_mode()
def test_half_precision_differs_by_its_rounding(dtype: torch.dtype) -> None:
    """As far from the exact outputs as the trained models are in that precision, on average."""
    noise, error = [], []
    for case in CASES:
        model = make(case)
        inputs = inputs_of(case, model)
        exact = model(inputs)
        rounded = make(case).to(dtype)(inputs.to(dtype) if inputs.is_floating_point() else inputs)
        served = InferenceModel(model, dtype=dtype)(inputs)
        noise.append(((rounded.double() - exact) / exact.std()).square().mean())
        error.append(((served.double() - exact) / exact.std()).square().mean())
    assert 0 < torch.stack(error).mean().sqrt() < 1.2 * torch.stack(noise).mean().sqrt()


@torch.inference_mode()
def test_a_token_of_small_values_is_read_in_half_precision() -> None:
    """One that training hardly saw: 1 over its level is more than float16 holds."""
    spec = TransformerSpec.uniform(
        width=8, layers=1, heads=2, d_k=4, d_v=4, d_f=8, length=4, inputs=9, outputs=9
    )
    model = Transformer(spec)
    model.embedding.table[0] *= 5e-6
    tokens = torch.tensor([[0, 3, 0, 1]])
    served = InferenceModel(model, dtype=torch.float16)
    assert deviation(served(tokens), model(tokens)) < 0.1


@pytest.mark.parametrize("names", [("attention_0",), ("mlp_1",), ("attention_1", "mlp_0")])
@torch.inference_mode()
def test_removed_operators_are_gone(names: tuple[str, ...]) -> None:
    case = next(case for case in GENERATIVE if case.dropped)
    model = without_operators(case, *names)
    served = InferenceModel(model, dtype=torch.float64)
    tokens = inputs_of(case, model)
    assert list(served.operators) == list(model.operators)
    assert deviation(served(tokens), model(tokens)) < 1e-12


@torch.inference_mode()
def test_an_embedding_alone_is_served() -> None:
    case = GENERATIVE[0]
    model = without_operators(case, *make(case).operators)
    served, tokens = InferenceModel(model, dtype=torch.float64), inputs_of(case, model)
    assert deviation(served(tokens), model(tokens)) < 1e-12
    cache = served.new_cache(2)
    assert (cache.bytes, served.cache_bytes_per_token) == (0, 0)
    assert deviation(served.prefill(tokens, cache), model(tokens)[:, -1]) < 1e-12


@pytest.fixture(scope="module")
def tiny() -> Transformer:
    spec = TransformerSpec.uniform(
        width=8, layers=2, heads=4, kv_heads=2, d_k=4, d_v=3, d_f=8, length=12, inputs=9, outputs=5,
        positions=True,
    )  # fmt: skip
    return Transformer(spec, seed=3).eval()


@pytest.mark.parametrize("batch", [1, 3, 256])
@torch.inference_mode()
def test_every_batch_and_length(tiny: Transformer, batch: int) -> None:
    served = InferenceModel(tiny)
    generator = torch.Generator().manual_seed(0)
    for length in range(1, 13):
        tokens = torch.randint(9, (batch, length), generator=generator)
        expected = tiny(tokens)
        assert deviation(served(tokens), expected) < 1e-4
        assert deviation(served(tokens, last=True), expected[:, -1]) < 1e-4


@torch.inference_mode()
def test_a_batch_in_several_passes_is_the_same(tiny: Transformer) -> None:
    tokens = torch.randint(9, (7, 10), generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([10, 1, 3, 9, 10, 2, 5])
    served = InferenceModel(tiny)
    whole = served(tokens, lengths, last=True)
    caches = [served.new_cache(7), served.new_cache(7)]
    logits = [served.prefill(tokens, caches[0], lengths)]
    served.tokens_per_pass = 25
    assert deviation(served(tokens, lengths, last=True), whole) < 1e-5
    logits.append(served.prefill(tokens, caches[1], lengths))
    assert deviation(logits[0], logits[1]) < 1e-5
    assert all(
        torch.allclose(one, other, atol=1e-5)
        for one, other in zip(caches[0].keys, caches[1].keys, strict=True)
    )


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("case", [case for case in CASES if case.dropped], ids=str)
@torch.inference_mode()
def test_padding_changes_no_output(case: Case, padding: str) -> None:
    """Against every sequence on its own; what stands in the padding is arbitrary."""
    model = make(case)
    inputs = torch.cat([inputs_of(case, model)] * 2)
    size = inputs.shape[1]
    lengths = torch.tensor([size, 1, 2, size - 1])
    kept = [slice(0, n) if padding == "right" else slice(size - n, size) for n in lengths.tolist()]
    for form in ("sdpa", "blocks"):
        served = InferenceModel(model, dtype=torch.float64, forms=Form(attention=form))  # type: ignore[arg-type]
        logits = served(inputs, lengths, padding=padding)
        last = served(inputs, lengths, padding=padding, last=True)
        for row, part in enumerate(kept):
            alone = model(inputs[row : row + 1, part])[0]
            assert deviation(logits[row, part], alone) < 1e-12
            assert deviation(last[row], alone[-1]) < 1e-12


@torch.inference_mode()
def test_a_longer_sequence_is_refused_with_both_lengths(tiny: Transformer) -> None:
    served = InferenceModel(tiny)
    with pytest.raises(UserError, match="a sequence of 13 positions is longer than the model's 12"):
        served(torch.zeros(1, 13, dtype=torch.long))
    with pytest.raises(UserError, match="13 positions is longer than the model's 12"):
        served.new_cache(1, 13)
    with pytest.raises(UserError, match="position 5 is beyond the cache's length of 4"):
        served.prefill(torch.zeros(1, 5, dtype=torch.long), served.new_cache(1, 4))


def test_a_precision_that_no_product_has_is_refused(tiny: Transformer) -> None:
    with pytest.raises(UserError, match=r"dtype = torch.int8: give torch.float32, torch.bfloat16"):
        InferenceModel(tiny, dtype=torch.int8)


def test_the_trained_model_is_left_alone(tiny: Transformer) -> None:
    before = {name: tensor.clone() for name, tensor in tiny.state_dict().items()}
    served = InferenceModel(tiny)
    with torch.inference_mode():
        served(torch.zeros(1, 12, dtype=torch.long))
    assert all(torch.equal(before[name], tensor) for name, tensor in tiny.state_dict().items())
    assert not any(tensor.requires_grad for tensor in served.state_dict().values())


@torch.inference_mode()
def test_traced_forms_have_free_batch_and_length(tiny: Transformer) -> None:
    served = InferenceModel(tiny, forms=Form(write="spread"))
    batch, length = torch.export.Dim("batch", max=64), torch.export.Dim("length", max=12)
    example = torch.zeros(2, 5, dtype=torch.long)
    exported = torch.export.export(served, (example,), dynamic_shapes=({0: batch, 1: length},))
    tokens = torch.randint(9, (7, 11), generator=torch.Generator().manual_seed(0))
    assert deviation(exported.module()(tokens), tiny(tokens)) < 1e-4
