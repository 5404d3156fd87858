"""Programs on pages and examples run, and do what the pages say."""

import ast
import json
import re
import textwrap
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import gaugelasso
from gaugelasso import load_model
from gaugelasso.config import load_config
from gaugelasso.tasks import Draw, Retrieval
from gaugelasso.training.trainer import Trainer
from tests.command import run_process
from tests.docs.pages import (
    OWN_LOOP,
    OWN_MODEL,
    OWN_TASK,
    PYTHON,
    README,
    ROOT,
    RUN_FOLDER,
    SERVING,
    Block,
    blocks,
    read,
    write_task,
)
from tests.examples import example
from tests.tasks.tokenizers import byte_level, save

EXAMPLES = sorted((ROOT / "examples").glob("your_*.py"))
TASK_EXAMPLES = [ROOT / "configs" / name / "small.toml" for name in ("sorting", "addition")]


def run_page(page: Path) -> types.ModuleType:
    """A module made of the page's runnable blocks, in order."""
    module = types.ModuleType(f"docs_{page.stem.replace('-', '_')}")
    for block in blocks(page):
        if block.mark == "runnable":
            exec(compile(block.text, str(page), "exec"), module.__dict__)
    return module


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_python_on_pages_compiles(block: Block) -> None:
    ast.parse(textwrap.dedent(block.text))


def test_the_loop_on_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = (block for block in blocks(README) if block.kind == "python")
    text, steps = block.text.replace("2000", "20"), 20
    assert text.count("20)") == block.text.count("2000)") == 2
    names: dict[str, Any] = {}
    with pytest.warns(gaugelasso.TargetMissedWarning, match="0.25 was missed"):  # too short
        exec(compile(text, str(README), "exec"), names)
    assert names["result"].steps == steps
    assert not names["result"].held
    assert f"{names['compressor'].fma_initial:,.0f} ->" in capsys.readouterr().out


def test_the_programs_on_the_serving_page_run(capsys: pytest.CaptureFixture[str]) -> None:
    program, cached, captured, fastest = (
        block.text for block in blocks(SERVING) if block.mark == "runnable"
    )
    exec(compile(program, str(SERVING), "exec"), {})
    accuracy, texts = capsys.readouterr().out.splitlines()
    assert "the likeliest is the same in 100.00%" in accuracy
    assert all(1 <= len(text) <= 20 for text in json.loads(texts))
    exec(compile(cached, str(SERVING), "exec"), {})
    assert capsys.readouterr().out == "tensor([14, 12])\n"
    names: dict[str, Any] = {}
    exec(compile(captured, str(SERVING), "exec"), names)
    assert torch.equal(names["logits"], names["served"](names["tokens"]))
    assert names["logits"].shape == (6, 32, 256)
    assert len(names["texts"][0]) == 16
    names = {}
    exec(compile(fastest, str(SERVING), "exec"), names)
    assert names["logits"].shape == (4, 32, 256)
    assert names["served"].engine in capsys.readouterr().out


def test_the_tokenizer_on_the_serving_page_reads_and_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tokenizers")
    (block,) = (block for block in blocks(SERVING) if "Tokenizer.from_file" in block.text)
    path = re.search(r'from_file\("(.+)"\)', block.text)
    assert path
    save(byte_level(), tmp_path / path[1])
    monkeypatch.chdir(tmp_path)
    reading, _, writing = block.text.partition("print(")
    names: dict[str, Any] = {}
    exec(compile(reading, str(SERVING), "exec"), names)
    names["new_tokens"] = names["prompt"]
    exec(compile(f"print({writing}", str(SERVING), "exec"), names)
    assert capsys.readouterr().out == "The \n"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_run(path: Path) -> None:
    with pytest.warns(gaugelasso.TargetMissedWarning):  # too short to learn anything
        compressor = example(path.stem).main(steps=20)
    assert compressor.steps == 20
    assert all(parameter.isfinite().all() for parameter in compressor.model.parameters())


@pytest.mark.parametrize("path", TASK_EXAMPLES, ids=lambda path: path.parent.name)
def test_example_tasks_train(path: Path, tmp_path: Path) -> None:
    short = {"steps": 8, "warmup": 2, "cooldown": 2, "batch": 4, "final_batches": 1}
    changes = {f"train.{key}": str(value) for key, value in short.items()} | {
        "target.loss": "99",
        "target.hold": "pressed",
    }
    config = load_config(path, changes | {"train.eval_every": "4", "train.device": "cpu"})
    summary = Trainer(config, tmp_path / "run").run()
    assert summary["steps"] == 8
    assert 0 <= summary["metric"]["value"] <= 1


def test_the_sorting_example_sorts() -> None:
    task = load_config(TASK_EXAMPLES[0]).task
    tokens, targets = task.batch(5, Draw(1), "cpu")
    symbols, separator, answers = tokens[:, :8], tokens[:, 8], tokens[:, 9:]
    assert torch.equal(targets, symbols.sort(dim=1).values)
    assert torch.equal(answers, targets[:, :-1])
    assert (separator == 16).all()
    outputs = torch.nn.functional.one_hot(targets, 16) * 50.0
    outputs = torch.cat([torch.zeros(5, 8, 16), outputs], dim=1)
    assert task.loss(outputs, targets) < 1e-6
    assert task.metric(outputs, targets) == 1
    outputs[0, 8] = outputs[0, 8].roll(1)
    assert task.metric(outputs, targets) == pytest.approx(4 / 5)


def test_the_addition_example_keeps_its_streams_apart() -> None:
    task: Any = load_config(TASK_EXAMPLES[1]).task
    parts = [set(part.tolist()) for part in task.parts()]
    assert set.union(*parts) == set(range(97 * 97))
    assert sum(map(len, parts)) == 97 * 97
    for stream, part in enumerate(parts):
        tokens, targets = task.batch(50, Draw(1, 2, stream), "cpu")
        assert torch.equal(targets, tokens[:, :2].sum(dim=1) % 97)
        assert set((tokens[:, 0] * 97 + tokens[:, 1]).tolist()) <= part
    for wrong in ({"held_out": 0.0}, {"held_out": 1.0}, {"modulus": 1}, {"held_out": float("nan")}):
        with pytest.raises(gaugelasso.UserError, match=next(iter(wrong))):
            type(task)(**wrong)


def test_the_task_on_its_page_trains(tmp_path: Path) -> None:
    # A target that is always met, so that compression is on after warm-up.
    page = run_page(OWN_TASK)
    summary = page.main(tmp_path / "run", steps=60, loss_target=100.0)
    assert summary["steps"] == 60
    assert len(read(tmp_path / "run" / "events.jsonl").splitlines()) == 1
    check_run_folder_page(tmp_path / "run", summary)


def check_run_folder_page(run: Path, summary: dict[str, Any]) -> None:
    """Every file of a run, and every key of its rows and its summary, is on the page."""
    described = set(re.findall(r"`([\w.-]+)/?`", read(RUN_FOLDER)))
    (checkpoint, *_) = (run / "checkpoints").iterdir()
    files = {path.name for folder in (run, checkpoint) for path in folder.iterdir()}
    assert files <= described, files - described
    metric = {summary["metric"]["name"]}
    for log in ("metrics.jsonl", "events.jsonl"):
        row = json.loads(read(run / log).splitlines()[0])
        assert row.keys() - metric <= described, row.keys() - described
    assert summary.keys() <= described, summary.keys() - described


def test_the_loop_on_its_page_saves_what_can_be_loaded(tmp_path: Path) -> None:
    page = run_page(OWN_LOOP)
    compressor = page.own_loop(tmp_path / "checkpoint", steps=80, loss_target=100.0)
    assert compressor.history
    model = load_model(tmp_path / "checkpoint")
    assert model.structure() == compressor.structure
    inputs, _ = Retrieval(vocabulary=16, modulus=4, length=16).batch(2, Draw(0), "cpu")
    with torch.no_grad():
        assert torch.equal(model.eval()(inputs), compressor.model.eval()(inputs))


def test_the_running_maximum_is_one() -> None:
    task = run_page(OWN_TASK).RunningMax(vocabulary=9, length=7)
    tokens, labels = task.batch(3, Draw(5), "cpu")
    for position in range(7):
        assert torch.equal(labels[:, position], tokens[:, : position + 1].amax(dim=1))


def test_the_models_on_the_model_page_pass_the_check() -> None:
    """The page checks the transformer itself."""
    page = run_page(OWN_MODEL)
    assert page.result.passed
    tokens = torch.arange(6)
    torch.manual_seed(0)
    result = gaugelasso.check(page.Tied(words=6, width=4), (tokens, tokens))
    assert result.passed, str(result)


def test_a_task_is_named_as_the_page_describes(tmp_path: Path) -> None:
    write_task(OWN_TASK, tmp_path / "running_max.py")
    config = tmp_path / "running_max.toml"
    config.write_text(next(block.text for block in blocks(OWN_TASK) if block.kind == "toml"))
    short = [f"train.{key}" for key in ("steps=20", "warmup=5", "cooldown=5", "final_batches=1")]
    changes = [word for change in (*short, "target.loss=9") for word in ("--set", change)]
    code, _, err = run_process("train", config, "--out", tmp_path / "run", *changes)
    assert code == 0, err
    assert json.loads(read(tmp_path / "run" / "summary.json"))["task"] == "RunningMax"
