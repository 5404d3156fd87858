"""The command `compress`: from a pretrained model and a text to a smaller model in a folder."""

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gaugelasso import import_model
from gaugelasso.config import load_config
from gaugelasso.importing.folder import write_imported
from gaugelasso.runs.checkpoint import load_model
from gaugelasso.tasks import TEST
from gaugelasso.training.evaluation import evaluate, final_figures
from tests.cli.compress.commands import SHARE, VOCABULARY, changed, save_trained, table_row
from tests.command import Command, assert_user_error
from tests.importing.sources import qwen3
from tests.tasks.tokenizers import byte_level
from tests.tiny_runs import read

# --- what is written ------------------------------------------------------------------------


def test_one_command_does_it_all(out: Path, done: str) -> None:
    assert {path.name for path in out.iterdir()} == {
        "base", "original.json", "config.toml", "run", "hf",
    }  # fmt: skip
    config, original = load_config(out / "config.toml"), read(out / "original.json")
    assert config.target.loss == pytest.approx((1 + SHARE) * original["selection"]["loss"])
    summary = read(out / "run" / "summary.json")
    assert summary["fma_final"] < summary["fma_initial"]
    batches, rows = config.train.final_batches, {}
    for name, folder in (("original", out / "base"), ("compressed", out / "run")):
        found = final_figures(load_model(folder), config, batches, "cpu", TEST)
        rows[name] = found["loss"], found["bits per byte"]
    assert rows["original"] == pytest.approx(tuple(original["test"].values()))
    above = rows["compressed"][0] / rows["original"][0] - 1
    for name, index in (("nats per token", 0), ("bits per byte", 1)):
        cells = [f"{rows[which][index]:.4f}" for which in rows]
        assert table_row(done, name) == [*cells, f"{above:+.2%}"]
    work = summary["fma_initial"], summary["fma_final"]
    expected = [f"{work[0]:,.0f}", f"{work[1]:,.0f}", f"{work[0] / work[1]:.2f}x less"]
    assert table_row(done, "FMA per token, context 16") == expected
    parameters = [f"{summary[f'parameters_{when}']:,}" for when in ("initial", "final")]
    assert table_row(done, "parameters in the run")[:2] == parameters
    assert read(out / "hf" / "config.json")["model_type"] == "gaugelasso"
    assert (out / "hf" / "tokenizer.json").exists()
    assert "run the custom code?" not in done  # what transformers asks on the terminal


def test_a_shorter_context_is_announced(out: Path, done: str, made: Path) -> None:
    line = "context: 40 -> 16 tokens; keep it with --set model.context=40"
    assert done.index("train: ") < done.index(line) < done.index("step ")
    assert table_row(done, "context in tokens") == ["40", "16", "cut"]
    assert load_model(out / "run").initial_spec.length == 16
    # The source has no scales of writes.
    source = sum(parameter.numel() for parameter in reference(made / "model").parameters())
    assert table_row(done, "parameters of MODEL") == [f"{source:,}", "", ""]


def test_the_context_is_kept_on_demand(place: Path, gaugelasso: Command) -> None:
    write_imported(Path("model"), Path("base"))
    more = ("--steps", "20", "--form", "none", "--set", "model.context=40")
    code, said, error = gaugelasso("compress", "base", *changed(*more))
    assert code == 0, error
    assert "context: " not in said
    assert table_row(said, "context in tokens") == ["40", "40", ""]
    # Nothing of an imported model changes before the run, so nothing is said of its form.
    assert "parameters of MODEL" not in said
    assert table_row(said, "parameters")[0] == f"{parameters_of(Path('base')):,}"
    assert load_config(Path("out/config.toml")).task.length == 16
    assert load_model("out/run").initial_spec.length == 40


def parameters_of(folder: Path) -> int:
    return sum(parameter.numel() for parameter in load_model(folder).parameters())


def reference(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    with contextlib.redirect_stderr(io.StringIO()):  # a bar of progress
        return AutoModelForCausalLM.from_pretrained(folder)


def test_the_progress_line_says_what_is_bought_at_what_price(out: Path, done: str) -> None:
    *_, last = [line for line in done.splitlines() if line.startswith("step ")]
    found = re.search(r"bought: (.*)x less work, price: (.*)% loss \(allowed \+900.00%\)", last)
    assert found is not None
    *_, row = map(json.loads, (out / "run" / "metrics.jsonl").read_text().splitlines())
    initial = read(out / "run" / "initial.json")["fma"]
    assert found[1] == f"{initial / row['fma']:.2f}"
    # The original, measured on the same batches as the run.
    config = load_config(out / "config.toml")
    before = evaluate(load_model(out / "base"), config, config.train.eval_batches, "cpu").metric
    assert float(found[2]) == pytest.approx(100 * (row["bits per byte"] / before - 1), abs=0.01)


def test_a_stock_shape_goes_to_stock_engines(place: Path, gaugelasso: Command) -> None:
    more = ("--steps", "20", "--form", "gguf", "--set", "compress.shape=llama")
    code, said, error = gaugelasso("compress", "model", *changed(*more))
    assert code == 0, error
    assert "export: gguf: " in said
    assert gaugelasso("export", "out/run", "--form", "llama")[0] == 0
    before, after = (read(Path(each) / "config.json") for each in ("model", "out/run/export/llama"))
    assert after["architectures"] == ["LlamaForCausalLM"]
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers")
    assert any(after[size] < before[size] for size in sizes)
    found = import_model("out/gguf/model.gguf").spec()
    assert found.sites == tuple(range(after["hidden_size"]))
    answer = gaugelasso("compress", "model", *changed("--form", "llama", "--resume"))
    assert_user_error(answer, "--form llama holds models whose layers are alike; add --set")


QWEN3: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "head_dim": 8, "intermediate_size": 48,
    "num_hidden_layers": 1, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0,
}  # fmt: skip


def test_a_qwen3_model(place: Path, gaugelasso: Command) -> None:
    """With norms of heads and a window; no stock engine is offered what it cannot load."""
    save_trained(qwen3(**QWEN3), byte_level(VOCABULARY), Path("qwen3"))
    stock = ("--form", "gguf", "--set", "compress.shape=llama")
    answer = gaugelasso("compress", "qwen3", *changed("--steps", "20", *stock))
    assert_user_error(answer, "is none: it normalises queries and keys; choose hf, onnx")
    assert not Path("out").exists()
    more = ("--steps", "20", "--form", "native")
    code, said, error = gaugelasso("compress", "qwen3", *changed(*more))
    assert code == 0, error
    assert "export: native: " in said
    before, after = load_model("out/base").spec(), load_model("out/run").spec()
    assert after.qk_norm
    assert after.weights < before.weights
    assert after.operators[0].window == 5


# --- results that miss ------------------------------------------------------------------------


def test_a_missed_target_exports_nothing(place: Path, gaugelasso: Command) -> None:
    answer = gaugelasso("compress", "model", *changed("--above-original", "0%", "--steps", "20"))
    assert_user_error(answer, "--above-original 0% was missed in 20 steps")
    assert "gaugelasso export out/run --form hf" in answer[2]
    assert "nats per token" in answer[1]
    assert {path.name for path in (place / "out").iterdir()} == {
        "base", "original.json", "config.toml", "run",
    }  # fmt: skip
    assert gaugelasso("export", "out/run", "--form", "native")[0] == 0


def test_what_is_left_of_the_allowance(out: Path, done: str, gaugelasso: Command) -> None:
    """Below two thirds of it, a note; a result of the same work as before is said to be so."""
    path = out / "run" / "summary.json"
    summary, original = read(path), read(out / "original.json")["test"]["loss"]
    unused = "the allowance was not used up: "
    for part, smaller, note in (
        (0.9, True, None),
        (0.5, True, f"note: {unused}+450.0% loss, +900.0% allowed; more --steps may cut more"),
        (0.9, False, f"note: nothing was cut, and {unused}+810.0%"),
    ):
        work = summary["fma_final" if smaller else "fma_initial"]
        found = {"loss": (1 + SHARE * part) * original, "fma_final": work}
        path.write_text(json.dumps(summary | found))
        code, said, error = gaugelasso("compress", "model", *changed("--resume"))
        assert code == 0, error
        assert (unused in said) == (note is not None)
        assert note is None or note in said
        change = table_row(said, "FMA per token, context 16")[-1]
        assert change.endswith("x less") if smaller else change == "nothing was cut"
    path.write_text(json.dumps(summary | {"loss": 99.0, "fma_final": summary["fma_initial"]}))
    answer = gaugelasso("compress", "model", *changed("--resume"))
    assert_user_error(answer, "was missed in 30 steps, in which nothing was cut: the result")
    for said in (done, answer[1]):
        assert "curves and structure: gaugelasso report out/run" in said


def test_the_original_on_the_same_data_decides(out: Path, gaugelasso: Command) -> None:
    """The halves of a held-out text differ, and the target loss follows from the first."""
    for test_loss, held in ((100.0, True), (0.01, False)):
        original = read(out / "original.json")
        original["test"]["loss"] = test_loss
        (out / "original.json").write_text(json.dumps(original))
        summary = read(out / "run" / "summary.json") | {"held": not held}
        (out / "run" / "summary.json").write_text(json.dumps(summary))
        code, said, error = gaugelasso("compress", "model", *changed("--resume"))
        assert (code == 0) == held, error
        assert ("'held' is false in the run's summary.json" in said) == held


# --- errors -----------------------------------------------------------------------------------


def test_tokens_need_no_tokenizer(place: Path, gaugelasso: Command) -> None:
    (place / "model" / "tokenizer.json").unlink()
    encode = byte_level(VOCABULARY).encode
    for name in ("text", "valid"):
        np.save(f"{name}.npy", np.array(encode((place / f"{name}.txt").read_text()).ids))
    more = ("--data", "text.npy", "--valid", "valid.npy", "--steps", "20", "--form", "none")
    code, said, error = gaugelasso("compress", "model", *changed(*more))
    assert code == 0, error
    assert "bits per token" in said
