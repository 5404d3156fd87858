"""The kernels of inference against their references: alone, and in whole models.

On a GPU as compiled; elsewhere by Triton's interpreter, where Triton is installed.
"""

import pytest
import torch
from torch import Tensor

from gaugelasso.inference import Form, InferenceModel, attention, noise, operators, stream
from gaugelasso.inference.attention import attend
from gaugelasso.kernels.stream import EPS
from tests.contract.models import Case, make
from tests.inference.cases import CASES
from tests.inference.test_model import deviation, inputs_of
from tests.kernels import DEVICE
from tests.kernels.comparison import draw, draw_indices, draw_sites

pytest.importorskip("triton")

from gaugelasso.kernels.gpu import decoding, products

# Inputs, columns and tokens: of one block and of several, whole and not.
SIZES = [(1, 1, 1), (5, 7, 3), (70, 40, 33), (20, 140, 530)]


def a_stream(tokens: int, size: int, order: str) -> Tensor:
    x = draw(tokens, size)
    x[0] = 0  # a token without signal
    return x if order == "tokens" else x.T.contiguous().T


@pytest.mark.parametrize("order", ["tokens", "sites"])
@pytest.mark.parametrize("dense", [False, True], ids=["gathered", "dense"])
@pytest.mark.parametrize(("d", "c", "tokens"), SIZES)
def test_a_read_and_its_product(d: int, c: int, tokens: int, dense: bool, order: str) -> None:
    x = a_stream(tokens, d + 9, order)
    sites = torch.arange(4, 4 + d).to(DEVICE) if dense else draw_sites(d + 9, d).sort().values
    weight, maps = draw(d, positive=True), draw(d, 2 * c)
    first = 4 if dense else None
    plain = stream.Read(sites, weight, maps, "gather")
    for gated in (False, True):
        expected = plain(x, gated=gated)
        got = products.read_product(x, sites, weight, maps, EPS, gated=gated, first=first)
        assert torch.allclose(got, expected, atol=2e-5 * float(expected.abs().max()) + 1e-12)
        assert (got[0] == 0).all()


@pytest.mark.parametrize("order", ["tokens", "sites"])
@pytest.mark.parametrize("dense", [False, True], ids=["scattered", "dense"])
@pytest.mark.parametrize(("f", "d", "tokens"), SIZES)
def test_a_product_and_its_write(f: int, d: int, tokens: int, dense: bool, order: str) -> None:
    x = a_stream(tokens, d + 9, order)
    sites = torch.arange(4, 4 + d).to(DEVICE) if dense else draw_sites(d + 9, d).sort().values
    h, maps = draw(tokens, f), draw(f, d)
    expected = stream.Write(sites, maps, d + 9, "scatter")(x.clone(), h)
    # As stored: rows as long as the hardware likes.
    wide = stream.padded(maps.T, 16).T.contiguous()
    got = products.product_write_(x, h, wide, sites, first=4 if dense else None)
    assert got is x
    assert torch.allclose(got, expected, atol=2e-5 * float(expected.abs().max()))


@pytest.mark.parametrize(("d_k", "d_v"), [(2, 1), (6, 5), (24, 40)])
@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (4, 2)])
def test_one_token_over_a_cache(heads: int, groups: int, d_k: int, d_v: int) -> None:
    batch, length = 3, 150
    positions = torch.tensor([0, 149, 130], device=DEVICE)
    wide_k, wide_v = -(-d_k // 8) * 8, -(-d_v // 8) * 8
    q = torch.nn.functional.pad(draw(batch, heads, 1, d_k), (0, wide_k - d_k))
    keys, values = draw(batch, groups, length, d_k), draw(batch, groups, length, d_v, seed=1)
    for row, position in enumerate(positions.tolist()):  # what lies beyond is not read
        keys[row, :, position + 1 :], values[row, :, position + 1 :] = torch.nan, torch.nan
    got = decoding.attend_one(q, keys, values, positions, wide_v)
    mask = (torch.arange(length, device=DEVICE) <= positions[:, None])[:, None, None]
    expected = attend(q[..., :d_k], keys.nan_to_num(), values.nan_to_num(), mask=mask)
    assert got.shape == (batch, heads, 1, wide_v)
    assert torch.allclose(got[..., :d_v], expected, atol=1e-5)
    assert (got[..., d_v:] == 0).all()


def test_noise_is_that_of_the_reference() -> None:
    seeds = torch.tensor([0, 1, 2**63 - 1, -(2**63), -5], device=DEVICE)
    counts = torch.tensor([0, 1, 2, 10**6, 2**40], device=DEVICE)
    expected, got = torch.empty(5, 300), torch.empty(5, 300, device=DEVICE)
    noise.exponential_(expected, seeds.cpu(), counts.cpu())
    decoding.exponential_(got, seeds, counts)
    assert torch.allclose(got.cpu(), expected, rtol=1e-5, atol=1e-6)
    assert (got > 0).all()


@pytest.fixture
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (stream, operators, attention):
        monkeypatch.setattr(module, "uses_kernels", lambda tensor: True)


NAMES = {"grouped_keys", "no_rope"}
SERVED = [case for case in CASES if case.dropped and case.seed == 0 and case.row.name in NAMES]


@pytest.mark.usefixtures("with_kernels")
@pytest.mark.parametrize("attention_form", ["sdpa", "narrow"])
@pytest.mark.parametrize("case", SERVED, ids=str)
@torch.inference_mode()
def test_whole_models(case: Case, attention_form: str) -> None:
    model = make(case).float().to(DEVICE)
    inputs = inputs_of(case, model).to(DEVICE)
    inputs = inputs.float() if inputs.is_floating_point() else inputs
    form = Form("fused", "fused", attention_form)  # type: ignore[arg-type]
    order = "sites" if attention_form == "narrow" else "tokens"
    served = InferenceModel(model, forms=form, align=16, stream=order)  # type: ignore[arg-type]
    whole = model(inputs)
    assert deviation(served(inputs), whole) < 1e-4
    if not served.generates:
        return
    cache = served.new_cache(3)
    lengths = torch.tensor([2, 1], device=DEVICE)
    rows = torch.tensor([2, 0], device=DEVICE)
    logits = served.prefill(inputs[:, :3], cache, lengths, rows=rows)
    at = torch.arange(2, device=DEVICE)
    assert deviation(logits, whole[at, lengths - 1]) < 1e-4
    tokens = draw_indices(served.spec.inputs, 3)
    tokens[rows] = inputs[at, lengths]
    logits = served.decode(tokens, cache)[rows]
    assert deviation(logits, whole[at, lengths]) < 1e-4
