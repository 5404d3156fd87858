"""Benchmarks: the three models at inference, one row per work, the tables, the structures."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.paper_structure import LAYERS, structure
from rich.console import Console

from gaugelasso.axes import named_tensors
from gaugelasso.bench.inference import Sizes, bench_inference, bench_run, uniform_like
from gaugelasso.bench.measure import bench_step, work_per_token
from gaugelasso.bench.rows import record
from gaugelasso.compress import pricing
from gaugelasso.errors import UserError
from gaugelasso.models import Transformer
from gaugelasso.report.timing import busy, print_bench
from gaugelasso.runs.checkpoint import load_spec
from gaugelasso.training.trainer import Trainer
from tests.tiny import tiny
from tests.tiny_runs import newest


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
