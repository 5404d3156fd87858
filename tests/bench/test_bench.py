"""Benchmarks: the measured parts, one row per work, and the three models at inference."""

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.paper_structure import LAYERS, structure
from rich.console import Console

from gaugelasso.axes import named_tensors
from gaugelasso.bench import measure, stopwatch
from gaugelasso.bench.inference import Sizes, bench_inference, bench_run, uniform_like
from gaugelasso.bench.measure import bench_step, work_per_token
from gaugelasso.bench.rows import record
from gaugelasso.bench.stopwatch import in_turns, median_ms, quartiles
from gaugelasso.compress import pricing
from gaugelasso.errors import UserError
from gaugelasso.models import Transformer, round_up
from gaugelasso.report.timing import busy, print_bench
from gaugelasso.runs.checkpoint import load_spec
from gaugelasso.training.step import TrainingStep
from gaugelasso.training.trainer import Trainer
from tests.tiny import tiny
from tests.tiny_runs import newest

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


def test_models_are_served_in_turns(tmp_path: Path) -> None:
    config = tiny(tmp_path)
    spec, served = config.model.spec(config.task), []
    models = {name: Transformer(spec) for name in ("one", "two")}
    for name, model in models.items():
        model.register_forward_pre_hook(lambda *_, name=name: served.append(name))
    rows = bench_inference(models, config, "cpu", repeats=3)
    once = ["one"] * 5 + ["two"] * 5 + ["one", "two"] * 3
    assert served == once * 2
    for row in rows.values():
        for figure in ("latency_ms", "batch_ms"):
            low, high = row["quartiles"][figure]
            assert low <= row[figure] <= high


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


def test_a_row_replaces_the_older_one_of_its_work(tmp_path: Path) -> None:
    path = tmp_path / "new" / "bench.json"
    for work, ms in (("a", 1.0), ("b", 2.0), ("a", 3.0)):
        record(path, "cpu", "rows", {"work": work, "ms": ms})
    kept = json.loads(path.read_text())
    assert {row["work"]: row["ms"] for row in kept["rows"]} == {"a": 3.0, "b": 2.0}
    assert {"commit", "hardware", "date", "versions"} <= kept.keys()


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_the_uniform_model_is_the_nearest_in_work(tmp_path: Path, share: float) -> None:
    config = tiny(tmp_path)
    full = work_per_token(Transformer(config.model.spec(config.task)))
    near = work_per_token(Transformer(uniform_like(config, share * full)))
    assert near == pytest.approx(share * full, rel=0.5 if share < 0.5 else 0.2)
    assert near <= full


def test_a_run_is_served_beside_its_ancestor_and_a_uniform_model(tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = tiny(tmp_path, target__loss=10.0)
    summary = Trainer(config, run).run()
    rows = dict(bench_run(run, "run", config, "cpu", repeats=3))
    kinds = ("ancestor", "uniform", "compressed")
    names = [f"run-{kind}{form}-cpu" for kind in kinds for form in ("", "-served")]
    assert list(rows) == names
    for kind in kinds:
        plain, served = rows[f"run-{kind}-cpu"], rows[f"run-{kind}-served-cpu"]
        assert (plain["model"], plain["form"]) == (kind, "training")
        assert (served["model"], served["form"]) == (kind, "inference")
        assert plain["fma"] == served["fma"]
    memory = [rows[f"run-{kind}-served-cpu"]["weight_bytes"] for kind in ("compressed", "ancestor")]
    assert memory[0] < memory[1]
    ways = pricing.ACCOUNTINGS["fma"]
    model = Transformer(load_spec(run))
    count = pricing.total_fma(model.axis_table(), ways, named_tensors(model))
    assert rows["run-compressed-cpu"]["fma"] == count
    assert rows["run-ancestor-cpu"]["fma"] == summary["fma_initial"]
    assert all(row["latency_ms"] > 0 and row["tokens_per_s"] > 0 for row in rows.values())


def test_the_tables_say_what_was_measured(tmp_path: Path) -> None:
    config = tiny(tmp_path)
    step = bench_step(config, config.model.spec(config.task), "cpu", repeats=3)
    served = {
        f"r-{model}-cpu": served_row(model, speed)
        for model, speed in (("ancestor", 1000.0), ("compressed", 3000.0))
    }
    output = io.StringIO()
    print_bench({"tiny": step} | served, Console(file=output, width=120))
    assert "forward" in output.getvalue()
    assert "3.00×" in output.getvalue()
    assert "4.00 ±0%" in output.getvalue()
    assert "not rounded" not in output.getvalue()


def test_the_speedup_is_over_the_ancestor_in_the_same_form() -> None:
    rows = {
        f"r-{model}-{form}-cpu": served_row(model, speed) | {"form": form}
        for model, form, speed in (
            ("ancestor", "training", 1000.0),
            ("compressed", "training", 3000.0),
            ("ancestor", "inference", 2000.0),
            ("compressed", "inference", 8000.0),
        )
    }
    output = io.StringIO()
    print_bench(rows, Console(file=output, width=120))
    assert "3.00×" in output.getvalue()
    assert "4.00×" in output.getvalue()
    assert "8.00×" not in output.getvalue()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_words_stay_whole_on_a_narrow_terminal(device: str) -> None:
    sizes = {"batch": 128, "length": 512, "decode": False, "weight_bytes": 123_456_789,
             "cache_bytes_per_token": 55_296}  # fmt: skip
    times = {"latency_ms": 869.1, "batch_ms": 6677.3, "tokens_per_s": 1_234_567.0, "fma": 51.5e6}
    spread = {"quartiles": {"latency_ms": [700.0, 900.0], "batch_ms": [6000.0, 7300.0]}}
    rows = {
        f"{model}-{form}": served_row(model, 1.0)
        | {"form": form, "device": device} | times | sizes | spread
        for model in ("ancestor", "uniform", "compressed")
        for form in ("training", "inference")
    }  # fmt: skip
    output = io.StringIO()
    print_bench(rows, Console(file=output, width=80))
    printed = output.getvalue()
    for cell in ("ancestor", "serve", "51.5M", "123M", "55.3k", "869", "6,677 ±10%"):
        assert f" {cell} " in printed
    assert f"Serving on {device}, a batch of 128×512 tokens" in printed
    assert last_header(printed) == "tokens per s over ancestor"
    speeds = "in the form of the last row: ancestor 1.23M, uniform 1.23M, compressed 1.23M."
    assert speeds in " ".join(printed.split())


def last_header(printed: str) -> str:
    """The header of the last column, which has several lines."""
    lines = printed.splitlines()
    top = next(k for k, line in enumerate(lines) if line.startswith("┏"))
    end = next(k for k, line in enumerate(lines) if line.startswith("┡"))
    return " ".join(line.split("┃")[-2].strip() for line in lines[top + 1 : end])


@pytest.mark.parametrize("decode", [False, True])
def test_sizes_that_were_priced_can_be_timed(tmp_path: Path, decode: bool) -> None:
    config = tiny(tmp_path)
    model = Transformer(config.model.spec(config.task))
    seen: list[tuple[int, ...]] = []
    model.register_forward_pre_hook(lambda _, given: seen.append(tuple(given[0].shape)))
    sizes = Sizes(5, 4, decode)
    rows = bench_inference({"one": model}, config, "cpu", 3, served=True, sizes=sizes)
    assert list(rows) == (["one-served"] if decode else ["one", "one-served"])
    assert set(seen) == (set() if decode else {(1, 4), (5, 4)})
    for row in rows.values():
        assert (row["batch"], row["length"], row["decode"]) == (5, 4, decode)
        tokens = 5 if decode else 20
        assert row["tokens_per_s"] == pytest.approx(1000 * tokens / row["batch_ms"])
    assert sizes.suffix(config) == ("-5x4-decode" if decode else "-5x4")
    assert Sizes().suffix(config) == ""


def test_sizes_that_a_model_does_not_have_are_refused(tmp_path: Path) -> None:
    config = tiny(tmp_path)
    model = Transformer(config.model.spec(config.task))
    with pytest.raises(UserError, match="--length 7: the model's sequences have 6 tokens at most"):
        bench_inference({"one": model}, config, "cpu", 3, sizes=Sizes(length=7))
    with pytest.raises(UserError, match=r"--batch 1000000000000 .* lower it or --length"):
        bench_inference({"one": model}, config, "cpu", 3, sizes=Sizes(10**12))
    noncausal = Transformer(replace(config.model.spec(config.task), causal=False))
    with pytest.raises(UserError, match="decoding needs a causal model"):
        bench_inference({"one": noncausal}, config, "cpu", 3, sizes=Sizes(decode=True))


def served_row(model: str, speed: float, high: float = 2.1) -> dict[str, Any]:
    return {
        "model": model,
        "device": "cpu",
        "fma": 100,
        "latency_ms": 2.0,
        "batch_ms": 4.0,
        "tokens_per_s": speed,
        "quartiles": {"latency_ms": [1.9, high], "batch_ms": [4.0, 4.0]},
    }


def test_a_step_without_a_graph_has_no_line_for_itself(tmp_path: Path) -> None:
    config = tiny(tmp_path)
    row = bench_step(config, config.model.spec(config.task), "cpu", repeats=3)
    for graph in (row["graph"], True):
        output = io.StringIO()
        print_bench({"tiny": row | {"graph": graph}}, Console(file=output, width=120))
        assert ("without a graph" in output.getvalue()) == graph
    assert not row["graph"]
    assert row["eager_ms"] == row["ms"]


def test_repetitions_that_disagree_are_told() -> None:
    rows = {"calm": served_row("ancestor", 1000.0), "wild": served_row("compressed", 1.0, high=4.0)}
    assert busy({"calm": rows["calm"]}) == ""
    assert "repetitions disagree" in busy(rows)
    assert "wild, latency: ±52%" in busy(rows)
    assert "Is the machine busy? Run it again" in busy(rows)


def test_a_structure_is_found_in_runs_summaries_and_plain_files(tmp_path: Path) -> None:
    run = tmp_path / "run"
    Trainer(tiny(tmp_path, target__loss=10.0), run).run()
    spec = load_spec(run)
    assert load_spec(run / "summary.json") == spec
    assert load_spec(newest(run) / "structure.json") == spec
    (tmp_path / "odd.json").write_text('{"structure": {"sites": 3}}')
    with pytest.raises(UserError, match=r"odd\.json"):
        load_spec(tmp_path / "odd.json")


def test_the_papers_structure_has_the_widths_of_its_table() -> None:
    model = Transformer(structure())
    widths = model.axis_table().widths(named_tensors(model))
    kinds = ("d_ai", "d_k", "d_v", "d_ao", "d_mi", "d_f", "d_mo")
    for layer, row in enumerate(LAYERS):
        names = [
            f"operators.{'attention' if kind in kinds[:4] else 'mlp'}_{layer}.{kind}"
            for kind in kinds
        ]
        assert [widths[name] for name in names] == list(row)
    assert load_spec(Path("benchmarks/charlm-12l-paper.json")) == structure()


def test_noise_is_a_function_of_its_seed() -> None:
    from gaugelasso.tasks import Draw, Noise

    task = Noise(vocabulary=5, classes=3, length=7)
    first, again, other = (task.batch(2, Draw(seed), "cpu") for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    assert first[0].shape == (2, 7)
    assert int(first[1].max()) < 3
