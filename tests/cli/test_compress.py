"""The command `compress`: from a pretrained model and a text to a smaller model in a folder."""

import contextlib
import io
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gaugelasso import cli, import_model
from gaugelasso.cli.compression_folder import Stages
from gaugelasso.cli.compression_options import Share, Wanted, parse_share
from gaugelasso.cli.compression_plan import plan
from gaugelasso.config import Config, load_config
from gaugelasso.errors import UserError
from gaugelasso.export import FORMS
from gaugelasso.importing.folder import write_imported
from gaugelasso.runs.checkpoint import load_model
from gaugelasso.tasks import SELECTION, TEST
from gaugelasso.training.evaluation import evaluate, final_figures
from gaugelasso.training.trainer import Trainer
from tests.command import Command, assert_user_error, calling
from tests.importing.bases import tiny_gguf, tokenizer_metadata
from tests.importing.sources import llama, qwen3
from tests.tasks.tokenizers import byte_level
from tests.tiny_runs import assert_same_run, contents, read, stop_at

VOCABULARY = 300
SHARE = 9.0
# A few steps that cut: far too fast and far too high a price for a real model.
OPTIONS = (
    *("--data", "text.txt", "--valid", "valid.txt", "--above-original", f"{SHARE:.0%}"),
    *("--steps", "30", "--batch", "4", "--length", "16", "--device", "cpu", "--out", "out"),
    *("--set", "compress.lr=0.05", "--set", "compress.interval=5"),
    *("--set", "compress.drop_tolerance=1e9", "--set", "train.eval_every=10"),
)


def prose(sentences: int, seed: int) -> str:
    """Sentences of a small grammar: easy to learn, and no two texts are alike."""
    random = np.random.default_rng(seed)
    words = [["The", "A"], ["quick", "lazy", "brown"], ["fox", "dog"], ["jumps", "sleeps"],
             ["over", "in"], ["the house.", "the dogs.", "it."]]  # fmt: skip
    return " ".join(str(random.choice(part)) for _ in range(sentences) for part in words)


def save_trained(model: Any, tokenizer: Any, folder: Path) -> None:
    """Train a model a little on prose, and write it with its tokenizer."""
    tokens = torch.tensor(tokenizer.encode(prose(400, 2)).ids)
    windows = tokens[: len(tokens) // 16 * 16].view(-1, 16)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for step in range(40):
        batch = windows[torch.arange(8) + 8 * step % (len(windows) - 8)]
        optimizer.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
    with contextlib.redirect_stderr(io.StringIO()):  # a bar of progress
        model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama, trained for some steps, as a Hugging Face folder; and texts."""
    folder = tmp_path_factory.mktemp("made")
    tokenizer = byte_level(VOCABULARY)
    (folder / "text.txt").write_text(prose(400, 0))
    (folder / "valid.txt").write_text(prose(60, 1))
    model: Any = llama(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=1
    )
    save_trained(model, tokenizer, folder / "model")
    tiny_gguf(folder / "other.gguf", tokenizer_metadata(tokenizer))
    return folder


@pytest.fixture(scope="module")
def done(made: Path) -> str:
    """What the command prints; its folder is in `made`."""
    precision = torch.get_float32_matmul_precision()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(io.StringIO()) as said,
    ):
        patch.setenv("GAUGELASSO_CACHE", str(made / "cache"))
        patch.setenv("PYTORCH_CUDA_ALLOC_CONF", "")
        patch.setattr(sys, "argv", ["gaugelasso", "compress", "model", *OPTIONS])
        patch.chdir(made)
        with pytest.raises(SystemExit) as stopped:
            cli.main()
    torch.set_float32_matmul_precision(precision)
    assert stopped.value.code in (None, 0)
    return said.getvalue()


@pytest.fixture
def place(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Model and texts in the working directory."""
    monkeypatch.setenv("GAUGELASSO_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(made, tmp_path, ignore=lambda *_: {"out"}, dirs_exist_ok=True)


@pytest.fixture
def out(done: str, made: Path, place: Path) -> Path:
    """The folder of a finished command in the working directory."""
    shutil.copytree(made / "out", place / "out")
    return Path("out")


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Command]:
    yield from calling(monkeypatch, capsys)


def changed(*more: str) -> tuple[str, ...]:
    """The options with others in place of the last of their name."""
    return (*OPTIONS, *more)


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


def table_row(said: str, name: str) -> list[str]:
    (line,) = [line for line in said.splitlines() if line.startswith(f"│ {name} ")]
    return [cell.strip() for cell in line.split("│")[2:-1]]


def test_a_shorter_context_is_announced(out: Path, done: str, made: Path) -> None:
    line = "context: 40 -> 16 tokens; keep it with --set model.context=40"
    assert done.index("train: ") < done.index(line) < done.index("step ")
    assert table_row(done, "context in tokens") == ["40", "16", "cut"]
    assert load_model(out / "run").initial_spec.length == 16
    # The source has no scales of writes.
    source = sum(parameter.numel() for parameter in reference(made / "model").parameters())
    assert table_row(done, "parameters of MODEL") == [f"{source:,}", "", ""]


def test_the_context_is_kept_on_demand(place: Path, command: Command) -> None:
    write_imported(Path("model"), Path("base"))
    more = ("--steps", "20", "--form", "none", "--set", "model.context=40")
    code, said, error = command("compress", "base", *changed(*more))
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


def test_a_stock_shape_goes_to_stock_engines(place: Path, command: Command) -> None:
    more = ("--steps", "20", "--form", "gguf", "--set", "compress.shape=llama")
    code, said, error = command("compress", "model", *changed(*more))
    assert code == 0, error
    assert "export: gguf: " in said
    assert command("export", "out/run", "--form", "llama")[0] == 0
    before, after = (read(Path(each) / "config.json") for each in ("model", "out/run/export/llama"))
    assert after["architectures"] == ["LlamaForCausalLM"]
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers")
    assert any(after[size] < before[size] for size in sizes)
    found = import_model("out/gguf/model.gguf").spec()
    assert found.sites == tuple(range(after["hidden_size"]))
    answer = command("compress", "model", *changed("--form", "llama", "--resume"))
    assert_user_error(answer, "--form llama holds models whose layers are alike; add --set")


QWEN3: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "head_dim": 8, "intermediate_size": 48,
    "num_hidden_layers": 1, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0,
}  # fmt: skip


def test_a_qwen3_model(place: Path, command: Command) -> None:
    """With norms of heads and a window; no stock engine is offered what it cannot load."""
    save_trained(qwen3(**QWEN3), byte_level(VOCABULARY), Path("qwen3"))
    stock = ("--form", "gguf", "--set", "compress.shape=llama")
    answer = command("compress", "qwen3", *changed("--steps", "20", *stock))
    assert_user_error(answer, "is none: it normalises queries and keys; choose hf, onnx")
    assert not Path("out").exists()
    more = ("--steps", "20", "--form", "native")
    code, said, error = command("compress", "qwen3", *changed(*more))
    assert code == 0, error
    assert "export: native: " in said
    before, after = load_model("out/base").spec(), load_model("out/run").spec()
    assert after.qk_norm
    assert after.weights < before.weights
    assert after.operators[0].window == 5


# --- stages ---------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 13])
def test_a_stopped_command_goes_on(steps: int, out: Path, command: Command) -> None:
    """The config alone trains the same run: here its first steps."""
    shutil.move(out / "run", "expected")
    shutil.rmtree(out / "hf")
    before = contents(out)
    if steps:
        stop_at(Trainer(load_config(out / "config.toml"), out / "run"), steps)
    code, said, error = command("compress", "model", *changed("--form", "native", "--resume"))
    assert code == 0, error
    assert ("resuming after step " in said) == (steps > 0)
    assert "import:" not in said
    assert "original:" not in said
    assert_same_run(Path("expected"), out / "run")
    assert (out / "native").is_dir()
    assert {name: data for name, data in contents(out).items() if name in before} == before


def test_a_finished_command_has_nothing_to_do(out: Path, command: Command) -> None:
    before = contents(out)
    code, said, error = command("compress", "model", *changed("--resume"))
    assert code == 0, error
    assert "Result" in said
    assert contents(out) == before
    code, said, error = command("compress", "model", *changed("--resume", "--form", "native"))
    assert code == 0, error
    assert contents(out).items() > before.items()


def test_an_imported_folder_is_taken_as_it_is(place: Path, command: Command) -> None:
    write_imported(Path("model"), Path("base"))
    options = changed("--form", "none", "--steps", "20")
    code, said, error = command("compress", "base", *options)
    assert code == 0, error
    assert "import: copied from 'base'" in said
    assert contents(Path("out/base")) == contents(Path("base"))
    assert not any((place / "out" / form).exists() for form in FORMS)
    assert command("compress", "base", *options, "--resume")[0] == 0
    before = contents(place / "out")
    write_imported(Path("other.gguf"), Path("other"))
    for model in ("other.gguf", "other"):
        answer = command("compress", model, *options, "--resume")
        assert_user_error(answer, f"--resume: 'out/base' was not imported from '{model}'")
    assert contents(place / "out") == before


def test_overwrite_replaces_its_own_folder_alone(out: Path, command: Command) -> None:
    options = changed("--overwrite", "--steps", "20", "--form", "none")
    before = contents(out)
    Path("empty.txt").write_text("")
    write = out / "notes.txt"
    write.write_text("mine")
    assert_user_error(command("compress", "model", *options), "'out' holds 'notes.txt', which")
    write.unlink()
    for arguments, message in (
        (("out/base", *options), "--overwrite would remove 'out/base'"),
        (("nothing", *options), "'nothing'"),
        (("model", *options, "--valid", "nothing"), "--valid 'nothing': no such file or folder"),
        (("model", *options, "--valid", "out/config.toml"), "would remove 'out/config.toml'"),
        (("model", *options, "--data", "empty.txt"), "--data 'empty.txt': the text is empty"),
        (("model", *options, "--set", "train.stepz=3"), "stepz"),
    ):
        assert_user_error(command("compress", *arguments), message)
    assert contents(out) == before
    code, _, error = command("compress", "model", *options)
    assert code == 0, error
    assert read(out / "run" / "summary.json")["steps"] == 20
    assert not (out / "hf").exists()


# --- results that miss ------------------------------------------------------------------------


def test_a_missed_target_exports_nothing(place: Path, command: Command) -> None:
    answer = command("compress", "model", *changed("--above-original", "0%", "--steps", "20"))
    assert_user_error(answer, "--above-original 0% was missed in 20 steps")
    assert "gaugelasso export out/run --form hf" in answer[2]
    assert "nats per token" in answer[1]
    assert {path.name for path in (place / "out").iterdir()} == {
        "base", "original.json", "config.toml", "run",
    }  # fmt: skip
    assert command("export", "out/run", "--form", "native")[0] == 0


def test_what_is_left_of_the_allowance(out: Path, done: str, command: Command) -> None:
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
        code, said, error = command("compress", "model", *changed("--resume"))
        assert code == 0, error
        assert (unused in said) == (note is not None)
        assert note is None or note in said
        change = table_row(said, "FMA per token, context 16")[-1]
        assert change.endswith("x less") if smaller else change == "nothing was cut"
    path.write_text(json.dumps(summary | {"loss": 99.0, "fma_final": summary["fma_initial"]}))
    answer = command("compress", "model", *changed("--resume"))
    assert_user_error(answer, "was missed in 30 steps, in which nothing was cut: the result")
    for said in (done, answer[1]):
        assert "curves and structure: gaugelasso report out/run" in said


def test_the_original_on_the_same_data_decides(out: Path, command: Command) -> None:
    """The halves of a held-out text differ, and the named loss follows from the first."""
    for test_loss, held in ((100.0, True), (0.01, False)):
        original = read(out / "original.json")
        original["test"]["loss"] = test_loss
        (out / "original.json").write_text(json.dumps(original))
        summary = read(out / "run" / "summary.json") | {"held": not held}
        (out / "run" / "summary.json").write_text(json.dumps(summary))
        code, said, error = command("compress", "model", *changed("--resume"))
        assert (code == 0) == held, error
        assert ("'held' is false in the run's summary.json" in said) == held


# --- errors -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--above-original", "-3%"), "--above-original '-3%': give a share"),
        (("--above-original", "3"), "--above-original '3' would be 300%; write 3% or 300%"),
        (
            ("--form", "tflite"),
            "--form 'tflite' is unknown; choose one of: onnx, pt2, hf, llama, gguf, native, none",
        ),
        (("--set", "target.loss=3"), "--set target.loss=3: give the target with --above-original"),
        (("--set", "task.path=b.txt"), "--set task.path=b.txt: give the text with --data"),
        (("--set", "train.stepz=3"), "stepz"),
        (("--set", "compress.drop_tolerance=much"), "compress.drop_tolerance"),
        (("--set", "model.layers=3"), "model.layers = 3: the structure comes from MODEL"),
        (("--steps", "3"), "--steps 3: a final loss needs at least 20 steps"),
        (("--device", "abacus"), "device 'abacus' is unknown"),
        (("--data", "nothing.txt"), "--data 'nothing.txt': no such file"),
        (("--data", "nothing"), "--data 'nothing': no text in this folder"),
        (("--data", "empty.txt"), "--data 'empty.txt': the text is empty"),
        (("--valid", "empty.txt"), "--valid 'empty.txt': the text is empty"),
        (("--data", "numbers.txt"), "text 'numbers.txt': 100.0% of its bytes are zero"),
        (("--valid", "short.txt"), "has 20 bytes, and so not more tokens; --length 16 needs at"),
        (("--resume", "--overwrite"), "exclude each other"),
    ],
)
def test_bad_arguments(
    more: tuple[str, ...],
    message: str,
    place: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Found before the import, which takes long for a large model."""
    (place / "short.txt").write_text("The quick brown fox.")
    (place / "empty.txt").write_text("")
    (place / "numbers.txt").write_bytes(bytes(10_000))
    (place / "nothing").mkdir()
    monkeypatch.setattr(Stages, "import_base", None)
    assert_user_error(command("compress", "model", *changed(*more)), message)
    assert not (place / "out").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--above-original", "2000%"), "--above-original 2000% names a loss of"),
        (("--above-original", "2000%"), "guessing among 300 tokens has 5.704"),
        (("--length", "41"), "--length 41: the model has 40 positions; give at most 40"),
        (("--set", "model.context=41"), "the model has 40 positions, and --length 16 and model.co"),
        (("--valid", "short.txt"), "has 32 tokens; --length 16 needs at least 81 (2 windows"),
    ],
)
def test_arguments_that_do_not_fit_the_model(
    more: tuple[str, ...], message: str, place: Path, command: Command
) -> None:
    """Nothing is left of a folder that the command has made; what was there stays."""
    (place / "short.txt").write_text("The quick brown fox." * 4)
    assert_user_error(command("compress", "model", *changed(*more)), message)
    assert not (place / "out").exists()
    write_imported(Path("model"), Path("out/base"))
    before = contents(place / "out")
    assert_user_error(command("compress", "model", *changed(*more, "--resume")), message)
    assert contents(place / "out") == before


def test_an_existing_folder_is_kept(out: Path, place: Path, command: Command) -> None:
    before = contents(out)
    for more, message in (
        ((), "output 'out' already exists; add --resume"),
        (("--resume", "--steps", "50"), "--resume: --steps is 50 now, and 30 in"),
        (("--resume", "--above-original", "500%"), "--resume: target.loss is"),
    ):
        assert_user_error(command("compress", "model", *changed(*more)), message)
    (place / "file").write_text("")
    answer = command("compress", "model", *changed("--out", "file", "--overwrite"))
    assert_user_error(answer, "output 'file' is a file")
    assert contents(out) == before


def test_models_that_cannot_be_compressed(place: Path, command: Command) -> None:
    assert_user_error(
        command("compress", "other.gguf", *OPTIONS), "check that MODEL and --data belong together"
    )
    tokenizer = place / "model" / "tokenizer.json"
    byte_level(VOCABULARY, ["<more>"]).save(str(tokenizer))
    assert_user_error(command("compress", "model", *OPTIONS), "the model has the tokens 0 to 299")
    tokenizer.unlink()
    message = "'model' has no tokenizer, which text needs (tokenizer.json is missing); name one"
    assert_user_error(command("compress", "model", *OPTIONS), message)
    tiny_gguf(place / "plain.gguf", {})
    message = "'plain.gguf' has no tokenizer, which text needs ("
    assert_user_error(command("compress", "plain.gguf", *OPTIONS), message)
    about = place / "model" / "config.json"
    about.write_text(about.read_text().replace("LlamaForCausalLM", "MambaForCausalLM"))
    answer = command("compress", "model", *OPTIONS)
    assert_user_error(answer, "the architecture 'MambaForCausalLM' cannot be imported")
    assert not (place / "out").exists()


def test_tokens_need_no_tokenizer(place: Path, command: Command) -> None:
    (place / "model" / "tokenizer.json").unlink()
    encode = byte_level(VOCABULARY).encode
    for name in ("text", "valid"):
        np.save(f"{name}.npy", np.array(encode((place / f"{name}.txt").read_text()).ids))
    more = ("--data", "text.npy", "--valid", "valid.npy", "--steps", "20", "--form", "none")
    code, said, error = command("compress", "model", *changed(*more))
    assert code == 0, error
    assert "bits per token" in said


def test_several_processes_are_refused(
    place: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert_user_error(command("compress", "model", *OPTIONS), "compress runs in one process")


# --- choices ------------------------------------------------------------------------------------


def test_shares() -> None:
    assert [parse_share(text).value for text in ("3%", "0.03", " .5 % ", "0", "1e-2", "300%")] == [
        0.03, 0.03, 0.005, 0.0, 0.01, 3.0,
    ]  # fmt: skip
    assert parse_share(" 5%").text == "5%"
    for text in ("1", "3", "1e2"):
        with pytest.raises(UserError, match=f"'{text}' would be .*00%; write {text}% or .*00%"):
            parse_share(text)
    for text in ("", "%", "3 percent", "-1", "nan", "inf", "1e999"):
        with pytest.raises(UserError, match="--above-original"):
            parse_share(text)


@pytest.mark.parametrize(("tokens", "steps"), [(9_000, 1000), (300_000, 2226), (10**6, 4000)])
def test_steps_follow_from_the_text(tokens: int, steps: int, out: Path) -> None:
    np.save("text.npy", np.arange(tokens) % VOCABULARY)
    share = Share(0.03, "3%")
    found = plan(out / "base", Wanted("text.npy", None, share, None, None, 8, {}))
    train, task = found.config.train, found.task
    assert train.steps == steps
    assert (train.batch, task.split, task.length) == (16, 0.05, 8)
    # All selection data once.
    windows = (len(task.part(SELECTION)) - 1) // 8
    assert (train.final_batches - 1) * 16 < min(windows, 64 * 16) <= train.final_batches * 16
    assert train.eval_batches == min(train.final_batches, 8)
    wanted = Wanted("text.txt", None, share, 50, 2, None, {"task.valid": "valid.txt"})
    given = plan(out / "base", wanted)
    assert (given.config.train.steps, given.task.length, given.task.split) == (50, 40, 0.0)
    assert "50 steps of 80 tokens in windows of 40" in given.describe()
    named = given.with_target(3.5)
    assert Config.from_dict(named.sections) == named.config
