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
        return {name: 0.002 if name != ("onnxruntime", 1) else 0.001 for name in actions}

    monkeypatch.setattr(fastest, "call_times", clock)
    with fastest.using_threads(2):
        found = fastest_on_cpu(model, TOKENS)
        assert torch.get_num_threads() == 2
    ways = [(engine, count) for engine in ("gaugelasso", "onnxruntime") for count in (1, 2)]
    assert asked == ways
    assert (found.engine, found.threads) == ("onnxruntime", 1)
    assert found.milliseconds == dict(zip(ways, (2.0, 2.0, 1.0, 2.0), strict=True))
    assert found.left_out == {}
    for inputs in (TOKENS, TOKENS[:1, :5]):
        assert torch.allclose(found(inputs), model(inputs).detach(), atol=1e-4)


def test_a_call_uses_its_own_threads_and_restores_those_of_torch() -> None:
    seen = []

    def run(inputs: torch.Tensor) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        if len(inputs) > 2:
            raise ValueError
        return inputs

    with fastest.using_threads(2):
        OnCpu("gaugelasso", 1, {}, run)(TOKENS)
        assert torch.get_num_threads() == 2
        with pytest.raises(ValueError, match=r"^$"):
            OnCpu("gaugelasso", 1, {}, run)(TOKENS.repeat(2, 1))
        assert torch.get_num_threads() == 2
        OnCpu("gaugelasso", 2, {}, run)(TOKENS)
    assert seen == [1, 1, 2]


def test_the_threads_of_torch_are_only_set_where_they_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(torch, "set_num_threads", calls.append)
    for count in (2, 1):
        with fastest.using_threads(count):
            pass
    assert calls == [1, 2]


def test_the_compiled_form_is_measured_if_it_is_asked_for(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiling takes minutes, so the compiler is replaced."""
    monkeypatch.setitem(extras.EXTRAS, "onnx", ("onnx", ("no_such_module",)))
    clock = {"gaugelasso": 0.002, "compiled": 0.001}
    monkeypatch.setattr(
        fastest,
        "call_times",
        lambda actions, _: {each: clock[each[0]] / each[1] for each in actions},
    )
    compiled: list[Any] = []

    def compiler(served: Any, dynamic: bool) -> Any:
        assert dynamic
        compiled.append(served)
        return lambda inputs: served(inputs)

    monkeypatch.setattr(torch, "compile", compiler)
    with fastest.using_threads(2):
        assert fastest_on_cpu(model, TOKENS, repeats=1).engine == "gaugelasso"
        assert not compiled
        found = fastest_on_cpu(model, TOKENS, repeats=1, compiled=True)
    assert (found.engine, found.threads) == ("compiled", 2)
    assert len(compiled) == 1
    assert torch.allclose(found(TOKENS), model(TOKENS).detach(), atol=1e-4)

    def broken(served: Any, dynamic: bool) -> Any:
        raise RuntimeError("no C++ compiler\nand more")

    monkeypatch.setattr(torch, "compile", broken)
    found = fastest_on_cpu(model, TOKENS, repeats=1, compiled=True)
    assert found.engine == "gaugelasso"
    assert found.left_out["compiled"] == "no C++ compiler"


def without(model: Transformer) -> OnCpu:
    found = fastest_on_cpu(model, TOKENS, repeats=1)
    assert found.engine == "gaugelasso"
    assert {engine for engine, _ in found.milliseconds} == {"gaugelasso"}
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
        fastest, "_in_onnxruntime", lambda model, _: [(1, lambda inputs: model(inputs) * 1.01)]
    )
    assert "its outputs are off by 0.01 " in without(model).left_out["onnxruntime"]


def test_inputs_elsewhere_are_refused(model: Transformer) -> None:
    with pytest.raises(UserError, match="the inputs are on meta; give some on the CPU"):
        fastest_on_cpu(model, TOKENS.to("meta"))
