"""A whole MLP of many tokens in one kernel, against its parts: alone, in models, and in tuning.

On a GPU as compiled; elsewhere by Triton's interpreter, where Triton is installed.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gaugelasso.inference import Form, InferenceModel, operators, stream, timed_parts
from gaugelasso.inference.folding import StreamOrder
from gaugelasso.kernels.tiles import FEW, JOINED, MOST_READ, MOST_WRITTEN, Tile
from tests.contract.models import Case, make
from tests.inference.test_model import deviation, inputs_of
from tests.kernels import DEVICE
from tests.kernels.comparison import draw, draw_sites
from tests.kernels.test_serving import SERVED, a_stream, with_kernels  # noqa: F401 (a fixture)

pytest.importorskip("triton")

from gaugelasso.kernels.gpu import mlp

TILE = Tile(16, 32, 0, 4, 2)
JOIN = Form("fused", "fused", "direct", joined=TILE)
SWIGLU = [case for case in SERVED if case.row.name in {"grouped_keys", "write_biases"}]


@pytest.mark.parametrize("order", ["tokens", "sites"])
@pytest.mark.parametrize("dense", [False, True], ids=["gathered", "dense"])
@pytest.mark.parametrize(
    ("d", "f", "w", "tokens"), [(1, 1, 1, 1), (16, 32, 16, 16), (70, 33, 17, 40), (300, 70, 90, 20)]
)
def test_an_mlp_of_many_tokens(
    d: int, f: int, w: int, tokens: int, dense: bool, order: str
) -> None:
    """It reads sites that it writes, and one token has no signal."""
    size = 330
    x = a_stream(tokens, size, order)
    sites, targets = draw_sites(size, d).sort().values, draw_sites(size, w, 1).sort().values
    if dense:
        sites, targets = (torch.arange(16, 16 + n, device=DEVICE) for n in (d, w))
    weight, maps, down = draw(d, positive=True), draw(d, 2 * f) / d**0.5, draw(f, w)
    read = stream.Read(sites, weight, maps, "gather", eps=1e-5)
    write = stream.Write(targets, down, size, "scatter")
    up, gate = read._plain(x).chunk(2, 1)
    expected = write(x.clone(), torch.nn.functional.silu(gate) * up)
    wide = stream.padded(down.T, 16).T.contiguous()
    firsts = (16, 16) if dense else (None, None)
    parts = (sites, weight, maps), (wide, targets)
    got = mlp.mlp_(x, *parts, 1e-5, TILE, firsts=firsts)
    assert got is x
    assert torch.allclose(got, expected, atol=2e-5 * float(expected.abs().max()))
    assert (got[0] == 0).all()


def test_sites_are_covered_by_few_powers_of_two() -> None:
    for d in range(1, MOST_READ + 1):
        pieces = [each for each in mlp._pieces(d) if each]
        assert all(each >= 16 and each & (each - 1) == 0 for each in pieces)
        assert d <= sum(pieces) < d + max(17, d / 6)
        assert pieces == list(mlp._pieces(d)[: len(pieces)])  # zeros come last


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each call of the kernel; any number of them counts as many."""
    tokens: list[int] = []
    kernel = mlp.mlp_

    def counted(x: Tensor, *arguments: Any, **named: Any) -> Tensor:
        tokens.append(len(x))
        return kernel(x, *arguments, **named)

    monkeypatch.setattr(mlp, "mlp_", counted)
    monkeypatch.setattr(operators, "FEW", 0)
    return tokens


@pytest.mark.usefixtures("with_kernels")
@pytest.mark.parametrize("order", ["tokens", "sites"])
@pytest.mark.parametrize("case", SWIGLU, ids=str)
@torch.inference_mode()
def test_whole_models(case: Case, order: StreamOrder, calls: list[int]) -> None:
    """An MLP that writes a bias has its parts."""
    model = make(case).float().to(DEVICE)
    inputs = inputs_of(case, model).to(DEVICE)
    served = InferenceModel(model, forms=JOIN, align=16, stream=order)
    assert deviation(served(inputs), model(inputs)) < 1e-4
    whole = [
        part
        for part in served.operators.values()
        if isinstance(part, operators.Mlp) and part.write.bias is None
    ]
    assert calls == [inputs.numel()] * len(whole)
    assert bool(whole) == (case.row.name == "grouped_keys")


@pytest.mark.usefixtures("with_kernels")
def test_few_tokens_and_wide_mlps_have_their_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in SWIGLU if case.row.name == "grouped_keys")
    served = InferenceModel(make(case).float().to(DEVICE), forms=JOIN, align=16)
    part = served.operators["mlp_0"]
    few, many = (draw(tokens, served.width) for tokens in (FEW, FEW + 1))
    assert part.joins(many)
    assert not part.joins(few)
    for name, most in (("read", MOST_READ), ("write", MOST_WRITTEN)):
        end, sites = getattr(part, name), getattr(part, name).sites
        end.sites = torch.zeros(most + 1, dtype=torch.long)
        assert not part.joins(many)
        end.sites = sites
    assert part.joins(many)
    monkeypatch.setattr(operators, "uses_kernels", lambda tensor: False)
    assert not part.joins(many)


@pytest.mark.usefixtures("with_kernels")
@pytest.mark.parametrize("wrong", [False, True], ids=["right", "wrong"])
@pytest.mark.parametrize("order", ["tokens", "sites"])
@torch.inference_mode()
def test_tuning_takes_it_if_it_is_right_and_faster(
    monkeypatch: pytest.MonkeyPatch, order: StreamOrder, wrong: bool, calls: list[int]
) -> None:
    """The last form is the fastest here. A kernel that disagrees is no candidate."""
    case = next(case for case in SWIGLU if case.row.name == "grouped_keys")
    model = make(case).float().to(DEVICE)
    inputs = inputs_of(case, model).to(DEVICE)

    def judge(_: str, actions: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
        return {name: -float(number) for number, name in enumerate(actions)}

    monkeypatch.setattr(timed_parts, "times_on", judge)
    if wrong:
        monkeypatch.setattr(mlp, "mlp_", lambda x, *arguments, **named: x.mul_(1.01))
    parts = timed_parts.Parts(model, torch.float32, False, *inputs.shape, 1, order)
    parts.gpu = parts.kernels = True
    parts.plain = InferenceModel(model, forms=Form(), stream=order, align=16)
    form, _, timings = parts._choose("mlp_0", parts.plain.readers()["mlp_0"])
    tiles = [] if wrong else JOINED
    assert list(timings["mlp"]) == ["parts", *(f"joined {tile}" for tile in tiles)]
    assert form.joined == (None if wrong else JOINED[-1])
    if not wrong:
        calls.clear()
        served = InferenceModel(model, forms=form, stream=order, align=16)
        assert deviation(served(inputs), model(inputs)) < 1e-4
        assert calls


def test_a_form_names_it() -> None:
    assert str(JOIN) == "fused, fused, direct, joined 16x32x0/4w2"
    assert str(replace(JOIN, joined=None)) == "fused, fused, direct"
