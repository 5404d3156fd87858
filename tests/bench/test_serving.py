"""The benchmark of serving: its rows, its file, its ratios and its time limit, with tiny cases."""

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import engines, serving, serving_case
from benchmarks.engines import llama_shapes
from benchmarks.serving_case import Case, Impossible

from gaugelasso.errors import UserError
from gaugelasso.models import Transformer, TransformerSpec


@pytest.fixture(autouse=True)
def _threads() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def uniform(**changes: Any) -> TransformerSpec:
    sizes = {"width": 8, "layers": 2, "heads": 2, "d_k": 4, "d_v": 4, "d_f": 8, "length": 20}
    return TransformerSpec.uniform(**{"inputs": 9, "outputs": 9, **sizes, **changes})


def test_the_works_have_the_structures_of_the_results() -> None:
    for name in ("retrieval", "demo"):
        models = serving.models_of(name)
        widths = {model: len(network.spec().sites) for model, (network, _) in models.items()}
        assert widths["compressed"] < widths["ancestor"]
        assert {origin for _, origin in models.values()} == {"random"}
        work = {model: serving.work_per_token(network) for model, (network, _) in models.items()}
        assert 0.5 < work["uniform"] / work["compressed"] < 2


def test_smollm2_is_measured_as_original_stock_and_compressed() -> None:
    work = serving.WORKS["smollm2"]
    ancestor, stock = work.plain_specs(0.0)
    compressed = serving.structure_in(serving.ROOT / work.result)
    assert (len(ancestor.sites), len(stock.sites), len(compressed.sites)) == (576, 435, 563)
    shapes = llama_shapes(stock)
    assert shapes["intermediate_size"] == 544
    assert (shapes["hidden_size"], shapes["num_attention_heads"]) == (441, 9)  # of 435 sites
    assert len(ancestor.operators) == len(stock.operators) == len(compressed.operators) == 60
    with pytest.raises(Impossible, match="whole stream"):
        llama_shapes(compressed)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_llama_cpp_is_measured_where_it_is_installed(phase: Any) -> None:
    case = Case(phase, 1, 20, "cpu", 1)
    with pytest.raises(Impossible, match="one sequence"):
        engines.llama_cpp(Transformer(uniform()), Case(phase, 2, 20, "cpu", 1))
    pytest.importorskip("llama_cpp")
    action, facts = engines.llama_cpp(Transformer(uniform()), case)
    action()
    action()
    assert facts["weight_bytes"] > 2 * 9 * 8


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_case_gives_a_row_for_each_model_that_an_engine_can_hold(phase: Any) -> None:
    whole = Transformer(uniform())
    odd = Transformer(uniform())
    odd.remove_operator("mlp_0")
    models = {"ancestor": (whole, "random"), "compressed": (odd, "random")}
    case = Case(phase, 2, 512, "cpu", 1)
    rows, skipped = serving.measure("demo", models, case, ["gaugelasso"], 3)
    assert [row["model"] for row in rows] == ["ancestor", "compressed"]
    assert not skipped
    for row in rows:
        assert (row["length"], row["batch"], row["threads"]) == (20, 2, 1)  # the model's length
        low, high = row["quartiles"]
        assert 0 < low <= row["ms"] <= high
        tokens = 2 * (20 if phase == "prefill" else 1)
        assert row["tokens_per_s"] == pytest.approx(1000 * tokens / row["ms"])
        assert row["cache_bytes_per_token"] == 2 * 2 * (4 + 4) * 4
    with pytest.raises(Impossible, match="layers"):
        llama_shapes(odd.spec())


def test_prefill_of_a_large_vocabulary_gives_the_logits_of_last_positions(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    network = Transformer(uniform())
    case = Case("prefill", 2, 512, "cpu", 1)
    assert not serving_case.fitted(case, network.spec()).last
    monkeypatch.setattr(serving_case, "LARGE_VOCABULARY", 9)
    assert not serving_case.fitted(replace(case, phase="decode"), network.spec()).last
    assert not serving_case.fitted(case, uniform(causal=False)).last
    small = serving_case.fitted(case, network.spec())
    assert (small.last, small.length, small.tokens) == (True, 20, 40)

    whole, last = (
        engines.gaugelasso(network, replace(small, last=each))[0] for each in (False, True)
    )
    assert whole().shape == (2, 20, 9)
    torch.testing.assert_close(last(), whole()[:, -1])

    models = {"ancestor": (network, "random")}
    rows, skipped = serving.measure("demo", models, case, ["gaugelasso"], 3)
    assert [each["logits"] for each in rows] == ["last"]
    assert not skipped
    # Beside rows of all positions, not in their place.
    path = tmp_path / "rows.json"
    del (before := dict(rows[0]))["logits"]
    for row in (before, rows[0], rows[0]):
        kept = serving.save(path, "cpu", [row], [])
    assert [each.get("logits") for each in kept] == [None, "last"]
    assert len(json.loads(path.read_text())["ratios"]) == 2


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of PyTorch's own exporter
@pytest.mark.parametrize(("engine", "package"), [
    ("transformers", "transformers"), ("onnxruntime", "onnxruntime"), ("llama.cpp", "llama_cpp"),
    ("hf", "transformers"),
])  # fmt: skip
def test_other_engines_give_the_logits_of_last_positions_too(engine: str, package: str) -> None:
    pytest.importorskip(package)
    batch = 1 if engine == "llama.cpp" else 2
    case = Case("prefill", batch, 20, "cpu", 1, last=True)
    found = engines.ENGINES[engine](Transformer(uniform(layers=1)), case)[0]()
    if package == "transformers":
        assert found.shape == (2, 1, 9)
    if engine == "onnxruntime":
        assert found[0].shape == (2, 9)


def test_a_case_that_does_not_fit_into_memory_is_named_with_its_sizes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    network = Transformer(uniform())
    case = Case("prefill", 1000, 20, "cpu", 1)
    needed = serving_case.COPIES * 4 * (network.spec().weights + 1000 * 20 * 9)
    serving_case.check_memory(network.spec(), case, needed)
    with pytest.raises(Impossible, match=r"3 copies of weights .* GB, logits 0.00072 GB do not"):
        serving_case.check_memory(network.spec(), case, needed - 1)
    serving_case.check_memory(network.spec(), replace(case, last=True), needed - 1)

    monkeypatch.setattr(serving, "free_bytes", lambda device: 10)
    models = {"ancestor": (network, "random")}
    rows, skipped = serving.measure("demo", models, case, ["gaugelasso", "transformers"], 3)
    assert not rows
    assert ["do not fit into 1e-08 GB" in each["reason"] for each in skipped] == [True, True]
    assert "preparing demo prefill 1000: ancestor in gaugelasso" in capsys.readouterr().out


def test_decoding_reads_the_whole_context() -> None:
    action, _ = engines.gaugelasso(Transformer(uniform()), Case("decode", 3, 20, "cpu"))
    first = action().clone()
    assert first.shape == (3, 16)
    assert ((first >= 0) & (first < 9)).all()
    action()  # and may be repeated


def test_failures_of_other_engines_are_kept_with_their_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(model: Transformer, case: Case) -> Any:
        def fail() -> None:
            raise RuntimeError("no graph")

        return fail, {}

    monkeypatch.setitem(serving.ENGINES, "transformers", broken)
    models = {"ancestor": (Transformer(uniform()), "random")}
    case = Case("prefill", 1, 8, "cpu", 1)
    rows, skipped = serving.measure("demo", models, case, ["gaugelasso", "transformers"], 3)
    assert [row["engine"] for row in rows] == ["gaugelasso"]
    assert [row["reason"] for row in skipped] == ["RuntimeError: no graph"]


def test_llama_has_the_shapes() -> None:
    shapes = llama_shapes(uniform(kv_heads=1, outputs=11))
    assert shapes == {
        "vocab_size": 11, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4,
        "max_position_embeddings": 20,
    }  # fmt: skip
    for changes in ({"d_v": 3}, {"rope": False}, {"causal": False}):
        with pytest.raises(Impossible):
            llama_shapes(uniform(**changes))


def row(model: str, engine: str, ms: float, **more: Any) -> dict[str, Any]:
    case = {"phase": "prefill", "batch": 1, "length": 8, "device": "cpu", "threads": 1}
    rest = {"ms": ms, "tokens_per_s": 8000 / ms, "quartiles": [ms, ms]}
    return {"work": "demo", "model": model, "engine": engine, **case, **rest, **more}


def test_ratios_are_of_the_best_engine_of_each_model() -> None:
    rows = [
        row("ancestor", "gaugelasso", 9.0, cache_bytes_per_token=100),
        row("ancestor", "transformers", 6.0, cache_bytes_per_token=100),
        row("uniform", "onnxruntime", 1.0),
        row("compressed", "gaugelasso", 2.0, cache_bytes_per_token=7),
    ]
    (found,) = serving.ratios(rows)
    assert found["over_ancestor"] == 3.0
    assert found["over_uniform"] == 0.5
    assert found["ancestor_over_transformers"] == pytest.approx(6 / 9)
    assert found["cache_bytes_per_token"] == {"ancestor": 100, "compressed": 7}
    assert found["commits"] == []
    (found,) = serving.ratios(rows[:1])
    assert found["over_ancestor"] is None


def test_ratios_say_whether_their_rows_took_turns(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        row("ancestor", "gaugelasso", 9.0, commit="b"),
        row("compressed", "gaugelasso", 3.0, commit="b"),
    ]
    assert serving.ratios(rows)[0]["commits"] == ["b"]
    serving.show(rows, [])
    assert "several commits" not in capsys.readouterr().out
    rows[0]["commit"] = "a"
    assert serving.ratios(rows)[0]["commits"] == ["a", "b"]
    serving.show(rows, [])
    assert "over_ancestor 3.00 (rows of several commits)" in capsys.readouterr().out


def test_a_later_row_replaces_the_same_one(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.json"
    serving.save(path, "cpu", [row("ancestor", "gaugelasso", 9.0)], [])
    other = row("compressed", "gaugelasso", 3.0)
    serving.save(path, "cpu", [other], [row("uniform", "transformers", 1.0, reason="none")])
    serving.save(path, "cpu", [row("ancestor", "gaugelasso", 6.0)], [])
    kept = json.loads(path.read_text())
    assert {each["model"]: each["ms"] for each in kept["rows"]} == {
        "ancestor": 6.0, "compressed": 3.0,
    }  # fmt: skip
    assert [each["reason"] for each in kept["skipped"]] == ["none"]
    assert kept["ratios"][0]["over_ancestor"] == 2.0
    assert {"commit", "hardware", "date"} <= set(kept)


def test_the_command_stops_at_its_time_and_keeps_what_it_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "rows.json"
    clock = iter([0.0, 0.0, 99.0])
    monkeypatch.setattr(serving.time, "monotonic", lambda: next(clock))
    words = ["--works", "demo", "--device", "cpu", "--engines", "gaugelasso", "--length", "8"]
    serving.main([*words, "--repeats", "3", "--seconds", "50", "--out", str(out)])
    kept = json.loads(out.read_text())["rows"]
    assert len(kept) == 3
    assert "stopped after 50 s" in capsys.readouterr().out
    assert statistics.median(each["ms"] for each in kept) > 0


def test_paths_name_their_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert serving.named_paths([f"demo={tmp_path}"]) == {"demo": tmp_path}
    with pytest.raises(UserError, match="'other=x': give WORK=PATH, with WORK one of charlm"):
        serving.named_paths(["other=x"])
    with pytest.raises(SystemExit) as exit_:
        serving.main(["--runs", "demo=missing"])
    assert exit_.value.code == 2
    assert "'missing' does not exist" in capsys.readouterr().err
