"""Commands on an imported model and on a run of it."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gaugelasso.bench.measure import shapes_of
from gaugelasso.config import run_config
from gaugelasso.files.tokenizer import load_tokenizer
from gaugelasso.models import Transformer, TransformerSpec
from gaugelasso.runs.checkpoint import load_model
from gaugelasso.tasks import TEST, Tokens
from gaugelasso.training.evaluation import final_figures
from tests.command import Command, assert_user_error
from tests.importing.bases import WIDTH
from tests.tiny_runs import read
from tests.training.pretrained.configs import config


def test_a_run_needs_its_base_no_more(run: Path, place: Path, gaugelasso: Command) -> None:
    """The tokenizer is in the run folder, and all that the config needs in config.json."""
    shutil.rmtree(place / "base")
    loaded = run_config(run)
    assert isinstance(loaded.task, Tokens)
    assert loaded.task.tokenizer == "run"
    code, said, error = gaugelasso("eval", run, "--batches", "1")
    assert code == 0, error
    model = load_model(run)
    expected = final_figures(model, loaded, 1, "cpu", TEST)
    assert f"loss {expected['loss']:.6f}  bits per byte {expected['bits per byte']:.6f}" in said
    assert "(1 batches of 2)" in said
    # A short text has fewer windows than that, and each counts once.
    more = gaugelasso("eval", run, "--batches", "1000")[1]
    assert more == gaugelasso("eval", run, "--whole")[1]
    assert "(all test data)" in more
    for arguments in (
        ("eval", run, "--whole"),
        ("eval", run, "--set", "task.length=8"),
        ("generate", run, "--length", "3"),
    ):
        code, said, error = gaugelasso(*arguments)
        assert code == 0, error
    assert "One channel of d_k is a RoPE pair" in gaugelasso("info", run)[1]


def test_a_base_and_a_run_are_measured_side_by_side(run: Path, gaugelasso: Command) -> None:
    code, said, error = gaugelasso("eval", "base", run, "--data", "valid.txt", "--length", "16")
    assert code == 0, error
    lines = said.splitlines()
    assert [line.split(":")[0] for line in lines] == ["base", "run"]
    for line, folder in zip(lines, ("base", "run"), strict=True):
        task = replace(config().task, path="valid.txt", valid="")  # type: ignore[type-var]
        assert isinstance(task, Tokens)
        model = load_model(folder).eval()
        with torch.no_grad():
            expected = task.text_figures(model, "cpu")
        assert f"bits per byte {expected['bits per byte']:.6f}" in line
        assert "(all of 'valid.txt' in windows of 16)" in line
    few = gaugelasso("eval", "base", "--data", "valid.txt", "--tokens", "9")[1]
    assert "(the first 9 tokens of 'valid.txt' in windows of 64)" in few


def test_models_are_measured_in_the_shortest_of_their_windows(
    run: Path, gaugelasso: Command
) -> None:
    line = "windows of 16 tokens for all models, the shortest of their windows ('base' 64, 'run' 16"
    given = ("--data", "valid.txt")
    code, said, error = gaugelasso("eval", "base", run, *given)
    assert code == 0, error
    assert said.startswith(line)
    assert said.splitlines()[1:] == (
        gaugelasso("eval", "base", run, *given, "--length", "16")[1].splitlines()
    )
    for arguments in (("base", "base", *given), ("base", run, *given, "--length", "8")):
        assert "for all models" not in gaugelasso("eval", *arguments)[1]


def test_folders_that_are_taken_for_a_run(run: Path, place: Path, gaugelasso: Command) -> None:
    about = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    for name, content in (("llama", about), ("hf", about | {"model_type": "gaugelasso"})):
        (place / name).mkdir()
        (place / name / "config.json").write_text(json.dumps(content))
    (place / "small.gguf").write_bytes(b"GGUF")
    shutil.copytree("base", "early/base")
    shutil.copytree("base", "smaller/base")
    shutil.copytree(run, "smaller/run")
    for folder, message in (
        (
            "llama",
            "'llama' is a Hugging Face folder; run gaugelasso import llama --out bases/llama",
        ),
        ("hf", "'hf' is an export for transformers; give the run folder that was exported"),
        ("small.gguf", "is a GGUF file; run gaugelasso import small.gguf --out bases/small first"),
        ("smaller", "'smaller' is a folder of gaugelasso compress: its run is 'smaller/run'"),
        ("early", "not trained yet; its imported model is 'early/base'; give that folder"),
    ):
        assert_user_error(gaugelasso("eval", folder, "--data", "valid.txt"), message)
        assert_user_error(gaugelasso("generate", folder), message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("eval", "base"), "'base' is imported and has no test data; give a text with --data"),
        (("bench", "base", "--inference"), "'base' is an imported model and no run; train from it"),
        (("eval", "base", "--tokens", "5"), "--tokens and --length belong to --data"),
        (("eval", "base", "--data", "a", "--whole"), "remove --whole"),
        (("eval", "base", "--data", "nothing.txt"), "--data 'nothing.txt': no such file"),
        (("eval", "base", "--data", "valid.txt", "--length", "65"), "has 64 positions"),
        (
            ("eval", "nothing", "--data", "valid.txt"),
            "'nothing' is not a run folder: no such folder",
        ),
        (("eval", "valid.txt", "--data", "valid.txt"), "'valid.txt' is a file; give a run folder"),
    ],
)
def test_bad_evaluations(
    arguments: tuple[str, ...], message: str, place: Path, gaugelasso: Command
) -> None:
    assert_user_error(gaugelasso(*arguments), message)


def test_a_base_generates_and_stops_at_the_end(place: Path, gaugelasso: Command) -> None:
    code, said, error = gaugelasso("generate", "base", "--prompt", "The quick", "--length", "5")
    assert code == 0, error
    assert said.startswith("The quick")
    # The most likely token after the prompt becomes the one that ends a text.
    reader = load_tokenizer(place / "base")
    start = torch.from_numpy(reader.encode(["The quick"])[0])[None]
    model = load_model("base").eval()
    end = int(model(start)[0, -1].argmax())
    arguments = ("--prompt", "The quick", "--length", "30", "--temperature", "0")
    assert len(gaugelasso("generate", "base", *arguments)[1]) > len("The quick\n")
    about = {"eos_token": {"content": reader.inner.id_to_token(end)}}
    (place / "base" / "tokenizer_config.json").write_text(json.dumps(about))
    assert gaugelasso("generate", "base", *arguments)[1] == "The quick\n"


def test_commands_that_need_a_fresh_model_say_so(run: Path, gaugelasso: Command) -> None:
    assert_user_error(gaugelasso("advise", run), "began with the weights of model.from = 'base'")
    assert_user_error(gaugelasso("baseline", run), "began with the weights of model.from = 'base'")


def test_the_found_structure_trains_from_scratch(run: Path, gaugelasso: Command) -> None:
    code, _, error = gaugelasso(
        "train", "run.toml", "--out", "scratch", "--structure", run, "--set", "train.steps=6"
    )
    assert code == 0, error
    given = read(Path("scratch") / "initial.json")
    assert given["given_structure"]
    again = load_model(run)
    assert isinstance(again, Transformer)
    assert given["structure"]["sites"] == list(again.spec().sites)


def test_such_a_run_is_pruned(run: Path, gaugelasso: Command) -> None:
    options = ("--rounds", "1", "--corrective", "1", "--finetune", "19", "--out", "pruned")
    code, _, error = gaugelasso("prune", run, "--fma", "20000", *options)
    assert code == 0, error
    assert read(Path("pruned") / "summary.json")["fma_final"] <= 20_000


def test_config_and_run_are_timed(run: Path, gaugelasso: Command) -> None:
    shapes = shapes_of(config(), None)
    assert isinstance(shapes, TransformerSpec)
    assert (shapes.length, len(shapes.sites)) == (16, WIDTH)
    options = ("--repeats", "3", "--out", "bench.json")
    code, _, error = gaugelasso("bench", run, "--inference", *options)
    assert code == 0, error
    # How to narrow such a model is not known.
    names = {row["model"] for row in read(Path("bench.json"))["inference"]}
    assert names == {"ancestor", "compressed"}
