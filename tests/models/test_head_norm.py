"""Norms of queries and keys, and windows of attention, against textbook formulas."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from gaugelasso import kernels
from gaugelasso.axes import Cost
from gaugelasso.models import SpecError, TransformerSpec
from gaugelasso.models.head_norm import HeadNorm
from tests.toys import gaussian

SIZES: dict[str, Any] = {
    "width": 8, "layers": 1, "heads": 4, "kv_heads": 2, "d_k": 6, "d_v": 4, "d_f": 4, "length": 9,
    "inputs": 7, "outputs": 7, "eps": 0.05,
}  # fmt: skip


def spec_of(window: int | None = None, qk_norm: bool = True, **settings: Any) -> TransformerSpec:
    spec = TransformerSpec.uniform(**SIZES | settings)
    attention = replace(spec.operators[0], window=window)
    return replace(spec, qk_norm=qk_norm, operators=(attention, *spec.operators[1:]))


@pytest.mark.parametrize("shape", [(2, 3), (6,)], ids=["rope", "no rope"])
@pytest.mark.parametrize("eps", [0.0, 0.05])
def test_a_fresh_norm_is_rmsnorm_of_each_head(shape: tuple[int, ...], eps: float) -> None:
    norm = HeadNorm(shape, eps=eps, by_token=False).double()
    nn.init.uniform_(norm.gain, 0.5, 2)
    if norm.channel is not None:
        nn.init.uniform_(norm.channel, 0.5, 2)
    rows = gaussian(4 * 6, 10, seed=1)
    heads = rows.view(4, 6, 10)
    expected = heads / (eps + heads.square().mean(1, keepdim=True)).sqrt()
    expected = expected * norm.gains.flatten()[:, None]
    torch.testing.assert_close(norm(rows), expected.flatten(0, 1))


@pytest.mark.parametrize("by_token", [False, True])
def test_energies_are_mean_squares_over_heads_and_tokens(by_token: bool) -> None:
    norm = HeadNorm((2, 3), eps=0.0, by_token=by_token).double()
    rows = gaussian(4 * 6, 10, seed=1) * torch.linspace(0.1, 9, 10, dtype=torch.float64)
    norm.eval()(rows)
    assert torch.equal(norm.energy, torch.ones(3).double())  # measured in training alone
    normal = norm.train()(rows).detach()
    counted = (normal if by_token else rows).view(4, 2, 3, 10)
    torch.testing.assert_close(norm.energy, counted.square().mean((0, 1, 3)))


def test_a_head_without_signal_is_zero_and_has_no_gradient() -> None:
    norm = HeadNorm((2, 3), eps=0.0, by_token=False)
    rows = torch.zeros(12, 5, requires_grad=True)
    out = norm(rows)
    out.sum().backward()
    assert rows.grad is not None
    assert not out.any()
    assert not rows.grad.any()


@pytest.mark.parametrize("window", [1, 3, 8, 9, 50, None])
def test_a_query_sees_the_keys_of_its_window(window: int | None) -> None:
    q, k, v = (gaussian(2, 4, 9, size, seed=size) for size in (6, 6, 5))
    found = kernels.attend(q, k, v, 0.3, True, window)[..., :5]
    for t in range(9):
        first = 0 if window is None else max(0, t - window + 1)
        scores = 0.3 * q[:, :, t : t + 1] @ k[:, :, first : t + 1].mT
        expected = scores.softmax(-1) @ v[:, :, first : t + 1]
        torch.testing.assert_close(found[:, :, t : t + 1], expected)


def test_rows_of_maps_can_be_taken_apart_and_joined() -> None:
    rows = gaussian(11, 5, seed=0)
    parts = kernels.split_rows(rows, [3, 6, 2])
    assert [len(part) for part in parts] == [3, 6, 2]
    assert torch.equal(kernels.join_rows(parts), rows)


@pytest.mark.parametrize("window", [1, 2, 5, 16, 17, 99])
def test_the_mean_number_of_visible_keys(window: int) -> None:
    cost = Cost("mix", 1, ("d_v",), window=window)
    expected = sum(min(t, window) for t in range(1, 17)) / 16
    assert math.isclose(cost.visible_keys(16, 17 / 2), expected)


def test_structures_keep_both_and_have_no_keys_without_them() -> None:
    spec = spec_of(window=3)
    assert TransformerSpec.from_dict(spec.to_dict()) == spec
    assert spec.to_dict()["operators"][0]["window"] == 3
    plain = spec_of(qk_norm=False)
    assert TransformerSpec.from_dict(plain.to_dict()) == plain
    assert "qk_norm" not in plain.to_dict()
    assert "window" not in plain.to_dict()["operators"][0]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"window": 0}, "attention_0 window = 0: must be a whole number of at least 1"),
        ({"window": True}, "attention_0 window = True"),
        ({"window": 3, "causal": False}, "attention_0: only a causal model can have a window"),
        ({"norm": "tied"}, "a model with qk_norm has norm = 'slow'"),
    ],
)
def test_what_cannot_be_built_is_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(SpecError, match=reason):
        spec_of(**settings)


@pytest.mark.parametrize("window", ["3", 2.5, [3]])
def test_a_window_of_another_type_is_refused(window: Any) -> None:
    data = spec_of(window=3).to_dict()
    data["operators"] = [{**data["operators"][0], "window": window}]
    with pytest.raises(SpecError, match="attention operator: window = "):
        TransformerSpec.from_dict(data)
