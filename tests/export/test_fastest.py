"""The fastest engine of a CPU is the one that the clock says, and computes the same."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gaugelasso import Transformer, UserError
from gaugelasso.export import OnCpu, extras, fastest, fastest_on_cpu
from tests.export.sources import tiny

TOKENS = torch.arange(34).reshape(2, 17)


@pytest.fixture(scope="module")
def model() -> Transformer:
    """Without its MLP, because an export takes seconds."""
    found = tiny(layers=1)
    found.remove_operator("mlp_0")
    return found


def test_onnxruntime_is_taken_where_it_is_faster(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def clock(actions: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
        asked.extend(actions)
        for action in actions.values():
            action()
        return {"gaugelasso": 0.002, "onnxruntime": 0.001}

    monkeypatch.setattr(fastest, "call_times", clock)
    found = fastest_on_cpu(model, TOKENS)
    assert asked == ["gaugelasso", "onnxruntime"]
    assert found.engine == "onnxruntime"
    assert found.milliseconds == {"gaugelasso": 2.0, "onnxruntime": 1.0}
    assert found.left_out == {}
    for inputs in (TOKENS, TOKENS[:1, :5]):
        assert torch.allclose(found(inputs), model(inputs).detach(), atol=1e-4)


def without(model: Transformer) -> OnCpu:
    found = fastest_on_cpu(model, TOKENS, repeats=1)
    assert found.engine == "gaugelasso"
    assert list(found.milliseconds) == ["gaugelasso"]
    assert torch.allclose(found(TOKENS), model(TOKENS).detach(), atol=1e-4)
    return found


def test_without_its_extra(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(extras.EXTRAS, "onnx", ("onnx", ("no_such_module",)))
    reason = without(model).left_out["onnxruntime"]
    assert "no_such_module" in reason
    assert "pip install 'gaugelasso[onnx]'" in reason


def test_an_engine_that_computes_something_else_is_left_out(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        fastest, "_in_onnxruntime", lambda model: lambda inputs: model(inputs) * 1.01
    )
    assert "its outputs are off by 0.01 " in without(model).left_out["onnxruntime"]


def test_inputs_elsewhere_are_refused(model: Transformer) -> None:
    with pytest.raises(UserError, match="the inputs are on meta; give some on the CPU"):
        fastest_on_cpu(model, TOKENS.to("meta"))
