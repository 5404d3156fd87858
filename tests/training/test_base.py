"""Runs that begin with the weights of an imported model, and the commands on them."""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gaugelasso.axes import named_tensors
from gaugelasso.bench.measure import shapes_of
from gaugelasso.compress.pricing import ACCOUNTINGS, total_fma
from gaugelasso.config import Config, load_config, run_config
from gaugelasso.config.base import BaseModel
from gaugelasso.errors import UserError
from gaugelasso.files.tokenizer import load_tokenizer
from gaugelasso.models import Transformer, TransformerSpec
from gaugelasso.runs.checkpoint import load_model
from gaugelasso.tasks import TEST, Tokens
from gaugelasso.training.evaluation import final_figures
from gaugelasso.training.trainer import Trainer
from tests.command import Command, assert_user_error, calling
from tests.importing.bases import CONTEXT, LAYERS, WIDTH, write_base
from tests.tasks.prose import write
from tests.tasks.tokenizers import WORDS
from tests.tiny_runs import assert_same_run, contents, read, stop_at

CONFIG = """
[task]
name = "tokens"
path = "train.txt"
valid = "valid.txt"
length = 16

[model]
from = "base"

[target]
loss = 5.5
hold = "pressed"

[compress]
lr = 0.01
interval = 5
drop_tolerance = 1e9

[train]
steps = 20
warmup = 2
cooldown = 4
batch = 2
log_every = 5
eval_every = 10
eval_batches = 1
final_batches = 2
checkpoint_every = 10
device = "cpu"
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An imported model, texts, a config, and a finished run."""
    folder = tmp_path_factory.mktemp("made")
    write_base(folder)
    write(folder / "train.txt", (WORDS * 5).encode())
    write(folder / "valid.txt", (WORDS * 3).encode())
    (folder / "run.toml").write_text(CONFIG)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GAUGELASSO_CACHE", str(folder / "cache"))
        patch.chdir(folder)
        Trainer(config(), Path("run")).run()
    return folder


@pytest.fixture
def place(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it all as the working directory, without the run."""
    monkeypatch.setenv("GAUGELASSO_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(made, tmp_path, ignore=lambda *_: {"run"}, dirs_exist_ok=True)


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Command]:
    yield from calling(monkeypatch, capsys)


def config(**changes: Any) -> Config:
    texts = {key.replace("__", "."): json.dumps(value) for key, value in changes.items()}
    return load_config(Path("run.toml"), texts)


# --- the config --------------------------------------------------------------------------


def test_the_config_takes_what_the_base_has(place: Path) -> None:
    found = config()
    assert isinstance(found.model, BaseModel)
    assert isinstance(found.task, Tokens)
    assert (found.task.inputs, found.task.tokenizer, found.model.context) == (300, "base", 16)
    section = found.to_dict()["model"]
    assert section.keys() == {"from", "context", "sha256"}
    assert (section["from"], len(section["sha256"])) == ("base", 64)
    assert Config.from_dict(found.to_dict()) == found


def test_costs_follow_the_context(place: Path) -> None:
    """Attention is over the mean of 1 to so many keys; all else is the same."""
    base = load_model("base")
    work = {}
    for length, context in ((16, 0), (16, 40), (16, CONTEXT), (8, 32)):
        found = config(task__length=length, model__context=context)
        assert isinstance(found.model, BaseModel)
        model = found.model.build(found.task, seed=5)
        assert all(map(torch.equal, model.state_dict().values(), base.state_dict().values()))
        assert model.spec().length == (context or length)
        trainer = Trainer(found, Path(f"run-{length}-{context}"))
        work[context or length] = trainer.record.fma_initial
        trainer.folder.close()
    per_key = 2 * WIDTH * LAYERS  # scores and values of all heads
    assert work[40] - work[16] == per_key * (41 - 17) / 2
    assert work[CONTEXT] - work[32] == per_key * (CONTEXT - 32) / 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__width": 64}, "model.width = 64: the structure comes from model.from = 'base'"),
        ({"model__name": "transformer"}, "model.name = 'transformer': the structure comes from"),
        ({"model__from": "nothing"}, "model.from = 'nothing': no such folder"),
        ({"model__from": "cache"}, "model.from = 'cache': holds no checkpoint"),
        ({"model__from": ""}, "model.from is empty"),
        ({"model__from": 3}, "model.from = 3: must be a string"),
        ({"model__context": 8}, "model.context = 8: must be at least task.length = 16"),
        ({"model__context": -1}, "model.context = -1"),
        ({"model__context": 65}, "the model has 64 positions, and task.length = 16 and"),
        ({"task__length": 65}, "the model has 64 positions"),
        ({"task__vocabulary": 301}, "its inputs is 300, and the task needs 301"),
        ({"task__tokenizer": "nothing"}, "tokenizer 'nothing': no such file"),
        ({"model__sha256": "abc"}, "its weights are not those of model.sha256 = 'abc'"),
        ({"train__batch": 10**9}, "train.batch = 1000000000 sequences"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str, place: Path) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        Trainer(config(**changes), Path("run"))
    assert not (place / "run").exists()


def test_the_base_is_not_overwritten(place: Path, command: Command) -> None:
    before = contents(place / "base")
    for flag in ("--overwrite", "--resume"):
        answer = command("train", "run.toml", "--out", "base", flag)
        assert_user_error(answer, "output 'base' is or holds the folder of model.from")
    assert contents(place / "base") == before


def test_a_base_inside_the_output_is_not_overwritten(run: Path, place: Path) -> None:
    (place / "base").rename(place / "run" / "reference")
    before = contents(place / "run")
    with pytest.raises(UserError, match="is or holds the folder of model"):
        Trainer(config(model__from="run/reference"), run, "overwrite")
    assert contents(place / "run") == before


# --- runs --------------------------------------------------------------------------------


def test_a_run_begins_with_the_weights(place: Path) -> None:
    trainer = Trainer(config(), Path("run"))
    base = load_model("base").state_dict()
    assert all(torch.equal(base[name], value) for name, value in trainer.model.state_dict().items())
    trainer.folder.close()
    run = Path("run")
    assert read(run / "config.json")["model"]["from"] == "base"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (run / name).read_bytes() == (place / "base" / name).read_bytes()


def test_a_resumed_run_is_the_same_run(run: Path, place: Path) -> None:
    stop_at(Trainer(config(), Path("broken")), 13)
    # The base may have moved: its fingerprint counts.
    (place / "base").rename(place / "moved")
    Trainer(config(model__from="moved"), Path("broken"), "resume").run()
    assert_same_run(run, Path("broken"))
    assert read(run / "summary.json")["metric"]["name"] == "bits per byte"


def test_another_base_or_tokenizer_does_not_resume(place: Path) -> None:
    stop_at(Trainer(config(), Path("run")), 13)
    before = contents(place / "run")
    checkpoint = place / "base" / "checkpoints"
    other = write_base(place / "again")
    with torch.no_grad():
        model = load_model(other)
        next(model.parameters()).add_(1)
    save_as(model, checkpoint)
    with pytest.raises(UserError, match=r"--resume: model\.sha256"):
        Trainer(config(), Path("run"), "resume")
    shutil.rmtree(place / "base")
    shutil.copytree(other, place / "base")
    path = place / "base" / "tokenizer.json"
    path.write_text(path.read_text().replace('"<|end|>"', '"<|END|>"'))
    with pytest.raises(UserError, match="--resume: the tokenizer"):
        Trainer(config(), Path("run"), "resume")
    assert contents(place / "run") == before


def save_as(model: Any, folder: Path) -> None:
    from gaugelasso.importing.folder import _Unpressed
    from gaugelasso.runs import checkpoint

    checkpoint.save(folder, _Unpressed(model), {"logs": {}})


def test_a_pretrained_model_with_the_named_work_is_refused(
    run: Path, place: Path, command: Command
) -> None:
    """Before anything is written, and before a run is replaced; less work is trained to."""
    model = load_model("base")
    model.set_context_(16)
    work = total_fma(model.axis_table(), ACCOUNTINGS["fma"], named_tensors(model))
    named = CONFIG.replace('loss = 5.5\nhold = "pressed"', f"fma = {work}")
    (place / "work.toml").write_text(named)
    before = contents(run)
    message = f"model.from = 'base' has {work:,.0f} FMA per token in a context of 16 tokens, so"
    for more in ((), ("--overwrite",)):
        out = "run" if more else "new"
        assert_user_error(command("train", "work.toml", "--out", out, *more), message)
    assert contents(run) == before
    assert not Path("new").exists()
    # A fresh model has still to be trained.
    options = ("--set", "train.distill=0", "--set", "compress.removal=pressure")
    answer = command("train", "work.toml", "--structure", run, "--out", "fresh", *options)
    assert answer[0] == 0, answer[2]
    less = ("--set", f"target.fma={0.95 * work}", "--set", "train.steps=40")
    answer = command("train", "work.toml", "--out", "new", *less)
    assert answer[0] == 0, answer[2]
    assert read(Path("new/summary.json"))["fma_final"] <= 0.95 * work


# --- commands ------------------------------------------------------------------------------


@pytest.fixture
def run(made: Path, place: Path) -> Path:
    shutil.copytree(made / "run", place / "run")
    return Path("run")


def test_a_run_needs_its_base_no_more(run: Path, place: Path, command: Command) -> None:
    """The tokenizer is in the run folder, and all that the config needs in config.json."""
    shutil.rmtree(place / "base")
    loaded = run_config(run)
    assert isinstance(loaded.task, Tokens)
    assert loaded.task.tokenizer == "run"
    code, said, error = command("eval", run, "--batches", "1")
    assert code == 0, error
    model = load_model(run)
    expected = final_figures(model, loaded, 1, "cpu", TEST)
    assert f"loss {expected['loss']:.6f}  bits per byte {expected['bits per byte']:.6f}" in said
    assert "(1 batches of 2)" in said
    for arguments in (
        ("eval", run, "--whole"),
        ("eval", run, "--set", "task.length=8"),
        ("generate", run, "--length", "3"),
    ):
        code, said, error = command(*arguments)
        assert code == 0, error
    assert "One channel of d_k is a RoPE pair" in command("info", run)[1]


def test_a_base_and_a_run_are_measured_side_by_side(run: Path, command: Command) -> None:
    code, said, error = command("eval", "base", run, "--data", "valid.txt", "--length", "16")
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
    few = command("eval", "base", "--data", "valid.txt", "--tokens", "9")[1]
    assert "(the first 9 tokens of 'valid.txt' in windows of 64)" in few


def test_models_are_measured_in_the_shortest_of_their_windows(run: Path, command: Command) -> None:
    line = "windows of 16 tokens for all models, the shortest of their windows ('base' 64, 'run' 16"
    given = ("--data", "valid.txt")
    code, said, error = command("eval", "base", run, *given)
    assert code == 0, error
    assert said.startswith(line)
    assert said.splitlines()[1:] == (
        command("eval", "base", run, *given, "--length", "16")[1].splitlines()
    )
    for arguments in (("base", "base", *given), ("base", run, *given, "--length", "8")):
        assert "for all models" not in command("eval", *arguments)[1]


def test_folders_that_are_taken_for_a_run(run: Path, place: Path, command: Command) -> None:
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
        assert_user_error(command("eval", folder, "--data", "valid.txt"), message)
        assert_user_error(command("generate", folder), message)


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
    arguments: tuple[str, ...], message: str, place: Path, command: Command
) -> None:
    assert_user_error(command(*arguments), message)


def test_a_base_generates_and_stops_at_the_end(place: Path, command: Command) -> None:
    code, said, error = command("generate", "base", "--prompt", "The quick", "--length", "5")
    assert code == 0, error
    assert said.startswith("The quick")
    # The most likely token after the prompt becomes the one that ends a text.
    reader = load_tokenizer(place / "base")
    start = torch.from_numpy(reader.encode(["The quick"])[0])[None]
    model = load_model("base").eval()
    end = int(model(start)[0, -1].argmax())
    arguments = ("--prompt", "The quick", "--length", "30", "--temperature", "0")
    assert len(command("generate", "base", *arguments)[1]) > len("The quick\n")
    about = {"eos_token": {"content": reader.inner.id_to_token(end)}}
    (place / "base" / "tokenizer_config.json").write_text(json.dumps(about))
    assert command("generate", "base", *arguments)[1] == "The quick\n"


def test_commands_that_need_a_fresh_model_say_so(run: Path, command: Command) -> None:
    assert_user_error(command("advise", run), "began with the weights of model.from = 'base'")
    assert_user_error(command("baseline", run), "began with the weights of model.from = 'base'")


def test_the_found_structure_trains_from_scratch(run: Path, command: Command) -> None:
    code, _, error = command(
        "train", "run.toml", "--out", "scratch", "--structure", run, "--set", "train.steps=6"
    )
    assert code == 0, error
    given = read(Path("scratch") / "initial.json")
    assert given["given_structure"]
    again = load_model(run)
    assert isinstance(again, Transformer)
    assert given["structure"]["sites"] == list(again.spec().sites)


def test_such_a_run_is_pruned(run: Path, command: Command) -> None:
    options = ("--rounds", "1", "--corrective", "1", "--finetune", "19", "--out", "pruned")
    code, _, error = command("prune", run, "--fma", "20000", *options)
    assert code == 0, error
    assert read(Path("pruned") / "summary.json")["fma_final"] <= 20_000


def test_config_and_run_are_timed(run: Path, command: Command) -> None:
    shapes = shapes_of(config(), None)
    assert isinstance(shapes, TransformerSpec)
    assert (shapes.length, len(shapes.sites)) == (16, WIDTH)
    options = ("--repeats", "3", "--out", "bench.json")
    code, _, error = command("bench", run, "--inference", *options)
    assert code == 0, error
    # How to narrow such a model is not known.
    names = {row["model"] for row in read(Path("bench.json"))["inference"]}
    assert names == {"ancestor", "compressed"}
