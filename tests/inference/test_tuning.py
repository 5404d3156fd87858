"""Tuning takes the fastest forms, and whichever it takes, the outputs stay."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch

from gaugelasso.errors import UserError
from gaugelasso.inference import (
    Form,
    InferenceModel,
    clocks,
    compare,
    timed_parts,
    tuned,
    tuning,
    usable,
)
from gaugelasso.inference.operators import Attention
from gaugelasso.inference.stream import Matrix, Read, Write
from gaugelasso.models import Transformer, TransformerSpec
from tests.contract.models import Case, make
from tests.inference.cases import CASES
from tests.inference.test_model import deviation, inputs_of

DROPPED = [case for case in CASES if case.dropped and case.seed == 0]


@pytest.mark.parametrize("case", DROPPED, ids=str)
@torch.inference_mode()
def test_a_tuned_model_has_the_same_outputs(case: Case) -> None:
    model = make(case).float()
    inputs = torch.cat([inputs_of(case, model)] * 3).to(
        torch.float32 if case.row.name in {"patches", "masked"} else torch.long
    )
    served = tuned(model, inputs, repeats=1)
    tied = model.initial_spec.tied_head  # its head has one form
    assert set(served.forms) == {*model.operators, *([] if tied else ["classifier"])}
    assert deviation(served(inputs), model(inputs)) < 1e-4


@pytest.mark.parametrize("last", [False, True])
def test_the_fastest_forms_are_taken(monkeypatch: pytest.MonkeyPatch, last: bool) -> None:
    """Each choice is what the clock says, among all forms of a part."""
    seen = set()

    def judge(actions: Mapping[Any, Callable[[], object]], repeats: int) -> dict[Any, float]:
        for action in actions.values():
            action()
        seen.add(tuple(actions))
        return {name: -number if last else number for number, name in enumerate(actions)}

    monkeypatch.setattr(timed_parts, "times_on", lambda _, *given: judge(*given))
    monkeypatch.setattr(tuning, "call_times", judge)
    case = next(case for case in DROPPED if case.row.name == "rope")
    model = make(case).float()
    served = tuned(model, inputs_of(case, model))
    assert seen == {
        ("gather", "window"),
        ("scatter", "window", "spread"),
        ("sdpa", "blocks"),
        (None, model.initial_spec.length),
    }
    form = served.forms["attention_0"]
    expected = ("window", "spread", "blocks") if last else ("gather", "scatter", "sdpa")
    assert (form.read, form.write, form.attention) == expected
    timings = served.timings["attention_0"]
    assert {kind: len(times) for kind, times in timings.items()} == {
        "read": 2, "write": 3, "attention": 2
    }  # fmt: skip
    assert served.tokens_per_pass == (model.initial_spec.length if last else None)


def test_the_shortest_time_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that is busy in one turn does not decide; neither does the first call."""
    spent = {"a": iter([9.0, 2.0, 5.0]), "b": iter([0.1, 3.0, 3.0])}
    clock = 0.0

    def work(name: str) -> None:
        nonlocal clock
        clock += next(spent[name])

    monkeypatch.setattr(clocks.time, "perf_counter", lambda: clock)
    actions = {"a": lambda: work("a"), "b": lambda: work("b")}
    assert clocks.fastest(clocks.call_times(actions, 2)) == ("a", 2.0)


@pytest.mark.parametrize("onednn", [False, True])
@torch.inference_mode()
def test_the_choice_of_a_library_ends_with_the_call(onednn: bool) -> None:
    case = DROPPED[0]
    model = make(case).float()
    served, before = InferenceModel(model), torch.backends.mkldnn.enabled
    inside = []
    served.classifier.register_forward_pre_hook(
        lambda *_: inside.append(torch.backends.mkldnn.enabled)
    )
    served.onednn = onednn
    served(inputs_of(case, model))
    assert inside == [bool(before and onednn)]
    assert torch.backends.mkldnn.enabled == before


@pytest.mark.parametrize("case", DROPPED, ids=str)
@torch.inference_mode()
def test_eight_bits_cost_little_accuracy_and_a_quarter_of_the_memory(case: Case) -> None:
    model = make(case).float()
    inputs = inputs_of(case, model)
    inputs = inputs.float() if inputs.is_floating_point() else inputs
    exact, rounded = (InferenceModel(model, int8=int8) for int8 in (False, True))
    assert compare(exact, model, inputs).largest < 1e-4
    accuracy = compare(rounded, model, inputs)
    assert 1e-4 < accuracy.mean_square < 0.1
    assert f"{100 * accuracy.agreement:.2f}%" in str(accuracy)

    def bytes_of(served: InferenceModel) -> int:
        return sum(
            part.maps.values.numel() * part.maps.values.element_size()
            for reader in served.readers().values()
            for part in reader.modules()
            if isinstance(part, Read | Write)
        )

    assert 4 * bytes_of(rounded) == bytes_of(exact)
    assert rounded.weight_bytes < exact.weight_bytes


@torch.inference_mode()
def test_a_column_of_zeros_stays_zero_in_eight_bits() -> None:
    case = next(case for case in DROPPED if case.row.name == "rope")
    model = make(case).float()
    model.classifier.out[:, 0] = 0
    logits = InferenceModel(model, int8=True)(inputs_of(case, model))
    assert torch.equal(logits[..., 0], torch.zeros_like(logits[..., 0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_forms_that_differ_by_more_than_rounding_do_not_agree(dtype: torch.dtype) -> None:
    exact = torch.randn(100, 60, generator=torch.Generator().manual_seed(0))
    expected = exact.to(dtype)
    spoiled = []
    for wrong in (0.15, float("nan")):
        spoiled.append(expected.clone())
        spoiled[-1][7, 3] += wrong
    unsteady = iter([expected, expected, expected * 1.01])
    for action in (lambda: spoiled[0], lambda: spoiled[1], lambda: next(unsteady)):
        with pytest.raises(usable.Disagrees):
            usable.check_agrees(action, expected)
    near = expected * (1 + 1e-5) if dtype is torch.float32 else (exact * 1.004).to(dtype)
    for same in (expected, near, expected[:0], expected[:1, :1]):
        usable.check_agrees(lambda same=same: same, expected[: len(same), : same.shape[1]])


@torch.inference_mode()
def test_rounding_does_not_leave_out_wide_heads() -> None:
    """What kernels of attention are compared on: values whose scores are not large."""
    spec = TransformerSpec.uniform(
        width=16, layers=1, heads=2, d_k=64, d_v=64, d_f=16, length=256, inputs=9, outputs=9
    )
    model, dtype = Transformer(spec).eval(), torch.bfloat16
    parts = timed_parts.Parts(model, dtype, False, 2, spec.length, 1)
    [name] = [each for each in parts.plain.readers() if each.startswith("attention")]
    choices = dict(parts._attentions(name, parts.plain.readers()[name], Form()))
    mix = choices["sdpa"][1]
    assert isinstance(mix, partial)
    exact = InferenceModel(model, dtype=torch.float32).readers()[name]
    assert isinstance(exact, Attention)
    rows, batch = mix.args[0].float(), mix.args[1]
    expected = mix()  # which rotates its rows in place
    usable.check_agrees(lambda: exact.mix(rows.clone(), batch, causal=True).to(dtype), expected)


@pytest.mark.parametrize(
    ("times", "by_output", "by_numpy"),
    [((1, 2, 3), False, False), ((2, 1, 3), True, False), ((3, 2, 1), True, True)],
    ids=["plain", "by output", "by NumPy"],
)
@torch.inference_mode()
def test_steps_are_computed_in_the_fastest_way(
    monkeypatch: pytest.MonkeyPatch, times: tuple[float, ...], by_output: bool, by_numpy: bool
) -> None:
    """The outputs stay, and oneDNN, which would reorder maps by output, is off."""
    case = next(case for case in DROPPED if case.row.name == "rope")
    model = make(case).float()
    inputs = inputs_of(case, model)[:1]
    spent = iter(times)
    monkeypatch.setattr(tuning, "call_times", lambda actions, repeats: {"step": next(spent)})
    served = tuned(model, inputs[:, :1], repeats=1)
    maps = [part.values for part in served.modules() if isinstance(part, Matrix)]
    assert maps
    assert all(each.T.is_contiguous() is by_output for each in maps if min(each.shape) > 1)
    assert not (by_output and served.onednn)
    assert served.steps_by_numpy is by_numpy
    expected = model(inputs)
    assert deviation(served(inputs), expected) < 1e-4
    cache = served.new_cache(1)
    for at in range(inputs.shape[1]):
        assert deviation(served.decode(inputs[:, at], cache), expected[:, at]) < 1e-4


def test_a_lost_device_is_not_a_form_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """An illegal access shows when the device is waited for, and then at every later call."""
    lost = False

    def wait() -> None:
        if lost:
            raise RuntimeError("an illegal memory access was encountered")

    def fail() -> None:
        raise RuntimeError("no kernel for this shape")

    def fault() -> None:
        nonlocal lost
        lost = True

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    assert not usable.works(fail)
    assert usable.works(lambda: None)
    with pytest.raises(RuntimeError, match="an illegal memory access") as found:
        usable.works(fault, "mlp_3: fused")
    assert found.value.__notes__ == ["in mlp_3: fused"]


def test_a_batch_that_does_not_fit_names_one_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: tried to allocate 90 GiB")

    monkeypatch.setattr(tuning, "_fastest_pass", fails)
    with pytest.raises(UserError, match=r"a batch of 64 does not fit .*; try \d"):
        tuned(make(CASES[0]), torch.zeros(64, 1, dtype=torch.long))
