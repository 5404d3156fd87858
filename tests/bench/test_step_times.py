"""Times of a training step: in turns, part by part, with events, and with widths rounded up."""

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from gaugelasso.bench import measure, stopwatch
from gaugelasso.bench.measure import bench_step, work_per_token
from gaugelasso.bench.stopwatch import in_turns, median_ms, quartiles
from gaugelasso.models import Transformer, round_up
from gaugelasso.report.timing import print_bench
from gaugelasso.training.step import TrainingStep
from tests.tiny import tiny

# Those that are measured. The others are differences, which noise can make negative.
PARTS = ("ms", "forward_ms", "gradients_ms", "baseline_ms", "eager_ms", "event_ms")


def test_the_median_leaves_out_the_warm_calls() -> None:
    calls = []
    assert median_ms(lambda: calls.append(1), "cpu", repeats=4, warm=3) >= 0
    assert len(calls) == 7


def test_slow_work_is_not_repeated_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopwatch, "MAX_SECONDS", 0.0)
    calls = []
    median_ms(lambda: calls.append(1), "cpu", repeats=30)
    assert len(calls) == 1 + stopwatch.FEWEST


def test_actions_take_turns_each_told_of_before() -> None:
    calls: list[str] = []
    actions: dict[str, Callable[[], Any]] = {
        name: lambda name=name: calls.append(name) for name in "ab"
    }
    times = in_turns(actions, "cpu", 3, 2, before=lambda name: calls.append(f"<{name}>"))
    warm = ["<a>", "a"] * 2 + ["<b>", "b"] * 2
    assert calls == warm + ["<a>", "a", "<b>", "b"] * 3
    assert {name: len(series) for name, series in times.items()} == {"a": 3, "b": 3}


def test_a_busy_while_slows_down_all_that_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, calls = 0.0, 0

    def work() -> None:
        nonlocal clock, calls
        calls += 1
        # Slower after the warm-up calls and two rounds of five.
        clock += 0.02 if calls > 14 else 0.001

    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: clock)
    times = in_turns({"a": work, "b": work}, "cpu", 5)
    assert times["a"] == pytest.approx([1, 1, 20, 20, 20])
    assert times["b"] == pytest.approx(times["a"])
    assert quartiles(times["a"]) == pytest.approx([1, 20])


def test_parts_of_a_step_are_timed_in_turns_each_in_its_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the full step records energies, and no part adds to older gradients."""
    groups: list[list[str]] = []
    now, seen = "", set()
    forward = TrainingStep.forward

    def spied(actions: Any, *args: Any, before: Any = None, **kwargs: Any) -> Any:
        def note(name: str) -> None:
            nonlocal now
            now = name
            if before:
                before(name)

        groups.append(list(actions))
        return in_turns(actions, *args, before=note, **kwargs)

    def look(step: TrainingStep, *batch: torch.Tensor) -> torch.Tensor:
        fresh = all(parameter.grad is None for parameter in step.model.parameters())
        seen.add((now, step.model.training, fresh))
        return forward(step, *batch)

    config = tiny(tmp_path, train__accumulate=1, train__probe=False)
    monkeypatch.setattr(measure, "in_turns", spied)
    monkeypatch.setattr(TrainingStep, "forward", look)
    bench_step(config, config.model.spec(config.task), "cpu", 3, multiple=4)
    parts = ["forward_ms", "gradients_ms", "baseline_ms"]
    assert groups == [["ms", "ms_exact", *parts], [""]]
    whole = {(name, True, True) for name in ("", "ms", "ms_exact")}
    assert seen == whole | {(name, False, True) for name in parts}


def test_captures_are_held_at_once_only_where_they_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each captured graph holds the memory of its step. Without a GPU they are plain functions."""
    groups: list[list[str]] = []

    def spied(actions: Any, *args: Any, **kwargs: Any) -> Any:
        groups.append(list(actions))
        return in_turns(actions, *args, **kwargs)

    monkeypatch.setattr(measure, "in_turns", spied)
    monkeypatch.setattr(measure, "GraphedStep", lambda action, on: action)
    config = tiny(tmp_path)
    step, exact = (
        measure._step(config, lambda: config.model.build(config.task, 3), "cpu") for _ in range(2)
    )
    times = measure._part_times(step, exact, graph=True, repeats=3)
    assert groups == [["ms", "ms_exact"], ["forward_ms"], ["gradients_ms"], ["baseline_ms"]]
    assert {name: len(series) for name, series in times.items()} == dict.fromkeys(times, 3)
    assert step.model.training


def test_a_step_is_timed_part_by_part(tmp_path: Path) -> None:
    config = tiny(tmp_path)
    row = bench_step(config, config.model.spec(config.task), "cpu", repeats=3)
    assert all(row[part] > 0 for part in PARTS)
    tokens = config.train.batch * config.train.accumulate * config.task.length
    assert row["tokens_per_s"] == pytest.approx(1000 * tokens / row["ms"])
    assert row["tflops"] == pytest.approx(6 * row["fma"] * tokens / (row["ms"] * 1e9))
    assert row["machinery_ms"] == pytest.approx(row["ms"] - row["baseline_ms"])
    assert row["optimizer_ms"] == pytest.approx(row["baseline_ms"] - row["gradients_ms"])
    assert row["backward_ms"] == pytest.approx(row["gradients_ms"] - row["forward_ms"])


def test_events_under_pressure_are_timed_without_a_cut(tmp_path: Path) -> None:
    config = tiny(tmp_path)
    spec = config.model.spec(config.task)
    row = bench_step(config, spec, "cpu", repeats=3)
    assert row["fma"] == row["fma_after_events"] == work_per_token(Transformer(spec))


def test_events_by_harm_are_timed_with_cuts_that_stay(tmp_path: Path) -> None:
    config = tiny(tmp_path, target__fma=1.0, compress__removal="harm")
    spec = config.model.spec(config.task)
    row = bench_step(config, spec, "cpu", repeats=3)
    assert row["fma"] == work_per_token(Transformer(spec))
    assert row["fma_after_events"] < 0.98 * row["fma"]
    assert row["parameters"] == sum(each.numel() for each in Transformer(spec).parameters())
    added = row["machinery_ms"] + row["event_ms"] / config.compress.interval
    assert row["machinery_share"] == pytest.approx(added / row["baseline_ms"])


def test_the_steps_after_an_event_are_timed_with_and_without_new_graphs(tmp_path: Path) -> None:
    config = tiny(tmp_path, target__fma=1.0, compress__removal="harm")
    step = measure._step(config, lambda: config.model.build(config.task, 3), "cpu")
    events = step.compressor.history
    times = measure._resumed_times(step, 3)
    assert {name: len(series) for name, series in times.items()} == {
        "resumed_ms": 3, "replayed_ms": 3,
    }  # fmt: skip
    # One to warm up, and one in each round; every one has changed the structure.
    assert [event.changed for event in events] == [True] * 4


def test_a_structure_is_timed_with_its_widths_rounded_up(tmp_path: Path) -> None:
    """Events keep the channels that rounding added, even those without effect."""
    config = tiny(tmp_path, model__width=7, model__d_f=5, model__d_v=3)
    spec = config.model.spec(config.task)
    attention, mlp = spec.operators
    # Attention reads sites 0, 1, 2, which no operator before it writes.
    operators = (replace(attention, reads=(4,)), mlp)
    spec = replace(spec, embed=(3, 4, 5, 6), operators=operators)
    row = bench_step(config, spec, "cpu", 3, multiple=4)
    assert row["fma"] == work_per_token(Transformer(round_up(spec, 4)))
    assert row["fma_exact"] == work_per_token(Transformer(spec)) < row["fma"]
    output = io.StringIO()
    print_bench({"tiny": row}, Console(file=output, width=120))
    assert row["ms_exact"] > 0
    assert "whole step, widths not rounded" in output.getvalue()
    expected = f"{row['fma']:,.0f} FMA per token with widths rounded up to multiples of 4, "
    assert expected + f"{row['fma_exact']:,.0f} without" in " ".join(output.getvalue().split())
