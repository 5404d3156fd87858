"""Steps by NumPy give the logits of a whole pass, for every model that has them."""

import copy
from dataclasses import replace

import pytest
import torch

from gaugelasso.inference import Form, InferenceModel, Sampling, generate
from gaugelasso.inference.attention import attend, attend_one
from gaugelasso.inference.stream import Matrix
from gaugelasso.models import Transformer
from gaugelasso.models.operator_spec import AttentionSpec
from tests.contract.models import Case, make
from tests.inference.cases import GENERATIVE
from tests.inference.test_generation import trained  # noqa: F401 (a fixture)
from tests.inference.test_model import WITHIN, deviation, inputs_of

SUPPORTED = [case for case in GENERATIVE if InferenceModel(make(case)).step_by_numpy_()]


def test_only_gelu_and_norms_of_heads_are_left_out() -> None:
    every, those = ({case.row.name for case in cases} for cases in (GENERATIVE, SUPPORTED))
    assert every - those == {"gpt2", "qk_norm", "qk_norm_no_rope"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("by_output", [False, True])
@pytest.mark.parametrize(
    "form",
    [Form(), Form("window", "window"), Form("gather", "spread"), Form("staged_gated", "fused")],
    ids=str,
)
@pytest.mark.parametrize("case", SUPPORTED, ids=str)
@torch.inference_mode()
def test_logits_are_those_of_a_whole_pass(
    case: Case, form: Form, by_output: bool, dtype: torch.dtype
) -> None:
    model = make(case)
    tokens = inputs_of(case, model)[:1]
    whole = model(tokens)
    served = InferenceModel(model, dtype=dtype, forms=form)
    for part in served.modules():
        if isinstance(part, Matrix):
            part.lay_(by_output)
    assert served.step_by_numpy_()
    for prompt in (0, 2):
        cache = served.new_cache(1)
        if prompt:
            served.prefill(tokens[:, :prompt], cache)
        for at in range(prompt, tokens.shape[1]):
            logits = served.decode(tokens[:, at], cache)
            assert deviation(logits, whole[:, at]) < WITHIN[dtype], at
        assert cache.positions.tolist() == [tokens.shape[1]]


@torch.inference_mode()
def test_other_steps_are_left_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several sequences, prompts of a length that the host does not know, and static shapes."""
    case = SUPPORTED[0]
    model = make(case)
    tokens = torch.cat([inputs_of(case, model)] * 2)
    whole = model(tokens)
    served = InferenceModel(model, dtype=torch.float64)
    assert served.step_by_numpy_()
    calls = []
    assert served._arrays is not None
    monkeypatch.setattr(type(served._arrays), "__call__", lambda self, *given: calls.append(given))
    lengths = torch.tensor([2])
    for batch, given, static in ((2, None, False), (1, lengths, False), (1, None, True)):
        cache = served.new_cache(batch)
        served.prefill(tokens[:batch, :2], cache, given)
        logits = served.decode(tokens[:batch, 2], cache, static=static)
        assert deviation(logits, whole[:batch, 2]) < 1e-12
    assert not calls


@torch.inference_mode()
def test_what_numpy_does_not_compute_is_not_promised() -> None:
    model = make(SUPPORTED[0])
    for options in ({"dtype": torch.bfloat16}, {"int8": True}, {"align": 8}):
        served = InferenceModel(model, **options)  # type: ignore[arg-type]
        assert not served.step_by_numpy_()
        assert not served.steps_by_numpy
    served = InferenceModel(model)
    assert served.step_by_numpy_()
    assert not served.step_by_numpy_(False)


@torch.inference_mode()
def test_converted_weights_are_not_computed_with_those_of_before() -> None:
    case = SUPPORTED[0]
    model = make(case)
    tokens = inputs_of(case, model)[:1]
    served = InferenceModel(model, dtype=torch.float32)
    assert served.step_by_numpy_()
    assert not copy.deepcopy(served).steps_by_numpy
    served.double()
    assert not served.steps_by_numpy
    assert served.step_by_numpy_()
    logits = served.decode(tokens[:, 0], served.new_cache(1))
    assert logits.dtype == torch.float64
    assert deviation(logits, model(tokens)[:, 0]) < 1e-4  # weights were rounded


def test_texts_are_those_of_pytorch(trained: Transformer) -> None:  # noqa: F811
    """Also where the text slides: its last half is read again."""
    served = {by_numpy: InferenceModel(trained) for by_numpy in (False, True)}
    new = trained.initial_spec.length + 5
    texts = {}
    for by_numpy, each in served.items():
        assert each.step_by_numpy_(by_numpy) is by_numpy
        texts[by_numpy] = generate(each, [[1, 2]], new, sampling=Sampling(0), slide=True)
    assert texts[True] == texts[False]


@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("by_numpy", [False, True])
@torch.inference_mode()
def test_a_step_sees_the_keys_of_its_window(window: int, by_numpy: bool) -> None:
    """Of sequences of equal length, and of unequal ones."""
    case = next(case for case in SUPPORTED if case.row.name == "grouped_keys")
    spec = make(case).spec()
    operators = tuple(
        replace(each, window=window) if isinstance(each, AttentionSpec) else each
        for each in spec.operators
    )
    model = Transformer(replace(spec, operators=operators)).double().eval()
    tokens = torch.randint(spec.inputs, (2, spec.length))
    whole = model(tokens)
    served = InferenceModel(model, dtype=torch.float64)
    served.step_by_numpy_(by_numpy)
    for rows in (slice(1), slice(2)):
        cache = served.new_cache(len(tokens[rows]))
        for at in range(spec.length):
            logits = served.decode(tokens[rows, at], cache)
            assert deviation(logits, whole[rows, at]) < 1e-12
    cache = served.new_cache(2)
    served.prefill(tokens[:, :3], cache, torch.tensor([3, 2]))
    logits = served.decode(torch.stack([tokens[0, 3], tokens[1, 2]]), cache)
    assert deviation(logits, torch.stack([whole[0, 3], whole[1, 2]])) < 1e-12


@pytest.mark.parametrize("form", ["sdpa", "blocks"])
@pytest.mark.parametrize("heads", [3, 6])
def test_one_query_attends_as_any_other(form: str, heads: int) -> None:
    """With equal and unequal widths, groups of several heads, and a mask."""
    batch, groups, seen = 2, 3, 7
    for d_k, d_v in ((4, 4), (2, 5), (6, 3)):
        q = torch.randn(batch, heads, d_k, dtype=torch.float64)
        k, v = (torch.randn(batch, groups, seen, d, dtype=torch.float64) for d in (d_k, d_v))
        mask = (torch.arange(seen) <= torch.tensor([[2], [6]]))[:, None, None]
        for given in (None, mask):
            expected = attend(q[:, :, None], k, v, mask=given)[:, :, 0]
            got = attend_one(q, k, v, given, form)  # type: ignore[arg-type]
            torch.testing.assert_close(got, expected)
