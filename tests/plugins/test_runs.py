"""Runs with a task and a model of the user: every command, resume, and what loading imports."""

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gaugelasso import Compressor, UserError, load_model
from gaugelasso.baselines import squeeze
from gaugelasso.cli import controls
from gaugelasso.config import load_config, run_config
from gaugelasso.plugins import NamedBy, Reference
from gaugelasso.runs import checkpoint
from gaugelasso.tasks import Draw
from gaugelasso.training.trainer import Trainer
from tests.baselines.test_retrain import train_here
from tests.command import Command, assert_user_error, run_process
from tests.tiny_runs import (
    assert_same_run,
    contents,
    keep_images,
    newest,
    read,
    rows,
    sign,
    stop_at,
)


def start(own: Path, name: str = "run", existing: Any = "refuse", **changes: str) -> Trainer:
    texts = {key.replace("__", "."): value for key, value in changes.items()}
    return Trainer(load_config(own, texts), own.parent.parent / "runs" / name, existing)


def finish(own: Path, name: str = "run", **changes: str) -> Path:
    trainer = start(own, name, **changes)
    trainer.run()
    return trainer.folder.path


def forget_imports() -> None:
    """As a new process would begin."""
    for name in list(sys.modules):
        if name == "beside" or name.startswith("gaugelasso_module_"):
            del sys.modules[name]


def test_a_run_is_compressed_and_its_model_loads(own: Path, caplog: Any) -> None:
    run = finish(own)
    summary, initial = read(run / "summary.json"), read(run / "initial.json")
    folder = own.parent.resolve()
    assert summary["task"] == "Regression"
    assert summary["model_class"] == initial["model_class"] == f"{folder}/my_models.py:Perceptron"
    assert initial["structure"] == {"inputs": 4, "hidden": 24, "outputs": 2}
    assert summary["structure"]["hidden"] == summary["widths"]["hidden"] < 24
    assert next(row["units"] for row in rows(run, "metrics.jsonl")) == 24
    assert set(read(run / "environment.json")["code"]) == {"task", "model"}
    forget_imports()
    caplog.clear()
    model = load_model(run)
    assert model.structure() == summary["structure"]
    (record,) = caplog.records
    assert f"importing '{folder}/my_models.py', which the run" in record.getMessage()
    inputs, _ = run_config(run).task.batch(16, Draw(3), "cpu")
    assert torch.isfinite(model(inputs)).all()


@pytest.mark.parametrize("model", ["own", "transformer"])
def test_resume_is_bit_identical_from_another_directory(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    if model == "transformer":
        text = own.read_text().replace("Regression", "Copying").replace("loss = 0.5", "loss = 2.0")
        widths = "width = 8\nlayers = 1\nheads = 2\nd_k = 4\nd_v = 4\nd_f = 8"
        text = text.replace('module = "my_models.py:build"\nhidden = 24', widths)
        own.write_text(text)
    trainer = start(own, "whole")
    keep_images(trainer, 27)
    trainer.run()
    whole = trainer.folder.path
    assert any(row["dropped"] for row in rows(whole, "events.jsonl"))
    forget_imports()
    monkeypatch.chdir("/")
    start(own, "27", "resume").run()
    assert_same_run(whole, tmp_path / "runs" / "27")


@pytest.mark.usefixtures("undrawn")
def test_every_command_works(
    gaugelasso: Command, own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    code, out, _ = gaugelasso("train", own, "--out", run, "--set", "model.hidden=20")
    assert code == 0
    assert "residual sites" not in out
    assert read(run / "initial.json")["widths"] == {"hidden": 20}
    code, out, _ = gaugelasso("train", own, "--out", run, "--set", "model.hidden=20", "--resume")
    assert code == 0
    code, out, _ = gaugelasso("eval", run, "--batches", "2")
    assert code == 0
    assert re.match(r"loss 0\.\d+  mse 0\.\d+  \(2 batches of 16\)", out)
    code, out, _ = gaugelasso("info", run)
    assert code == 0
    assert "hidden" in out
    code, out, _ = gaugelasso("report", run)
    assert code == 0
    assert "saturation:" not in out
    page = (run / "report" / "index.html").read_text()
    assert "task Regression" in page
    assert "hidden" in (run / "report" / "tables.md").read_text()
    code, out, _ = gaugelasso("bench", own, "--repeats", "3", "--out", tmp_path / "b.json")
    assert code == 0
    code, out, _ = gaugelasso(
        "bench", own, "--structure", run, "--repeats", "3", "--out", tmp_path / "b.json"
    )
    assert code == 0
    code, out, _ = gaugelasso(
        "bench", run, "--inference", "--repeats", "3", "--out", tmp_path / "b.json"
    )
    assert code == 0
    measured = read(tmp_path / "b.json")
    assert [row["fma"] for row in measured["rows"]] == [
        24 * 6,
        read(run / "summary.json")["fma_final"],
    ]
    assert {row["model"] for row in measured["inference"]} == {"ancestor", "compressed"}
    assert_user_error(gaugelasso("bench", own, "--multiple", "8"), "the built-in transformer only")
    assert_user_error(gaugelasso("advise", run), "advise changes the widths of the built-in")
    assert_user_error(gaugelasso("generate", run), "is a run of the task 'Regression'")
    assert_user_error(gaugelasso("show", run), "show needs a run of 'ff31'")


@pytest.mark.usefixtures("warm_python")
def test_a_sweep_and_its_report(gaugelasso: Command, own: Path, tmp_path: Path) -> None:
    code, _, err = gaugelasso(
        "sweep", own, "--seeds", "1,2", "--jobs", "2", "--out", tmp_path / "s"
    )
    assert code == 0, err
    assert len(read(tmp_path / "s" / "results.json")["runs"]) == 2
    code, _, _ = gaugelasso("pareto", tmp_path / "s", "--out", tmp_path / "p")
    assert code == 0
    assert "Regression" in (tmp_path / "p" / "pareto.md").read_text()


def test_reports_import_nothing(own: Path, gaugelasso: Command) -> None:
    run = finish(own)
    shutil.rmtree(own.parent)
    forget_imports()
    for command in ("info", "report"):
        code, _, err = gaugelasso(command, run)
        assert (code, err) == (0, "")


def test_changed_code_is_warned_of(own: Path, caplog: Any, gaugelasso: Command) -> None:
    stop_at(start(own), 15)
    with (own.parent / "my_tasks.py").open("a") as file:
        file.write("\n# another loss?\n")
    forget_imports()
    start(own, existing="resume").run()
    (warning,) = (r.getMessage() for r in caplog.records if "has changed" in r.getMessage())
    assert "the code of [task] has changed since the run" in warning
    row = json.loads((own.parent.parent / "runs/run/resumed.jsonl").read_text())
    assert row["code"] != read(own.parent.parent / "runs/run/environment.json")["code"]
    caplog.clear()
    assert gaugelasso("eval", own.parent.parent / "runs/run")[0] == 0
    assert any("the code of [task]" in r.getMessage() for r in caplog.records)


def test_code_that_has_moved_is_named_again(own: Path, gaugelasso: Command) -> None:
    stop_at(start(own), 15)
    run, moved = own.parent.parent / "runs" / "run", own.parent.parent / "moved"
    own.parent.rename(moved)
    forget_imports()
    assert_user_error(gaugelasso("eval", run), "no such file; if it has moved, name its place with")
    with pytest.raises(UserError, match=r"model_class = .*no such file; if it has moved"):
        load_model(run)
    start(moved / "own.toml", existing="resume").run()
    forget_imports()
    changes = [
        f"task.module={moved}/my_tasks.py:Regression",
        f"model.module={moved}/my_models.py:build",
    ]
    words = [word for change in changes for word in ("--set", change)]
    code, _, _ = gaugelasso("eval", run, *words)
    assert code == 0
    forget_imports()
    by = NamedBy(moved)
    Reference.parse("here", "my_models.py:Perceptron", by).load(by)
    assert load_model(run).structure() == read(run / "summary.json")["structure"]


def test_another_class_is_not_resumed(own: Path) -> None:
    stop_at(start(own), 15)
    own.write_text(own.read_text().replace(":build", ":Perceptron").replace(
        "hidden = 24", "inputs = 4\nhidden = 24\noutputs = 2"))  # fmt: skip
    with pytest.raises(
        UserError, match=r"--resume: model.module = .*Perceptron', but the run began"
    ):
        start(own, existing="resume")


# --- run folders from somewhere else ---------------------------------------------------


def test_a_run_folder_brings_no_code(own: Path, gaugelasso: Command) -> None:
    run = finish(own)
    trap = run / "my_tasks.py"
    write = f"import pathlib\npathlib.Path({str(run / 'ran')!r}).touch()\n"
    trap.write_text(write + (own.parent / "my_tasks.py").read_text())
    shutil.copy(own.parent / "my_models.py", run)
    config = read(run / "config.json")
    for module, message in (
        (f"{trap}:Regression", "the file is inside the run folder, and code that comes with"),
        (f"{own.parent}/../runs/run/my_tasks.py:Regression", "the file is inside the run folder"),
        ("my_tasks.py:Regression", "a run folder must name a file by its absolute path"),
    ):
        config["task"]["module"] = module
        (run / "config.json").write_text(json.dumps(config))
        forget_imports()
        assert_user_error(gaugelasso("eval", run), message)
    saved = newest(run)
    structure = (saved / "structure.json").read_text()
    trapped = json.loads(structure) | {"model_class": f"{run}/my_models.py:Perceptron"}
    (saved / "structure.json").write_text(json.dumps(trapped))
    sign(saved)
    with pytest.raises(UserError, match="the file is inside the run folder"):
        load_model(run)
    (saved / "structure.json").write_text(structure)
    sign(saved)
    assert not (run / "ran").exists()
    # The user may name it, having read it.
    code, _, _ = gaugelasso("eval", run, "--set", f"task.module={trap}:Regression",
                            "--set", f"model.module={own.parent}/my_models.py:build")  # fmt: skip
    assert code == 0
    assert (run / "ran").exists()


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("os:system", "it does not derive from gaugelasso.Compressible"),
        ("no_such_package.models:Net", "raised ModuleNotFoundError"),
        (3, "'model_class' is not a string"),
        ("nonsense", 'write "file.py:Name"'),
        ("gaugelasso.models:Transformer", "from_structure raised|structure"),
    ],
)
def test_only_models_are_built(own: Path, named: Any, message: str) -> None:
    run = finish(own)
    saved = newest(run)
    structure = read(saved / "structure.json") | {"model_class": named}
    (saved / "structure.json").write_text(json.dumps(structure))
    sign(saved)
    with pytest.raises(UserError, match=message):
        load_model(run)


# --- models that could not be loaded again ---------------------------------------------


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("local", "Local is defined inside a function"),
        ("Forgetful", r"builds another network: tensor 'down' is \(1, 2\), not \(16, 2\)"),
    ],
)
def test_a_model_that_cannot_be_rebuilt_is_refused_at_the_start(
    own: Path, model: str, message: str
) -> None:
    arguments = "\ninputs = 4\nhidden = 16\noutputs = 2" if model == "Forgetful" else ""
    text = own.read_text().replace("hidden = 24", "").replace(':build"', f':{model}"{arguments}')
    own.write_text(text)
    with pytest.raises(UserError, match=message):
        start(own)
    assert not (own.parent.parent / "runs" / "run").exists()


def test_a_refused_model_does_not_cost_the_run_that_it_would_replace(
    gaugelasso: Command, own: Path
) -> None:
    run = finish(own)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    own.write_text(own.read_text().replace("hidden = 24", "").replace(':build"', ':local"'))
    code, _, err = gaugelasso("train", own, "--out", run, "--overwrite")
    assert code == 2
    assert "Local is defined inside a function" in err
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_a_loop_of_the_user_saves_what_can_be_loaded(own: Path) -> None:
    config = load_config(own)
    model = config.model.build(config.task, 0)
    compressor = Compressor(model, loss_target=9.0)
    checkpoint.save(own.parent / "saved", compressor, {})
    again = load_model(own.parent / "saved")
    assert type(again) is type(model)
    assert all(
        torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True)
    )


def test_a_structure_that_does_not_follow_a_cut_ends_the_run_at_the_first_checkpoint(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start could not see it, and the model would be lost."""
    config = load_config(own)
    model = config.model.build(config.task, 0)
    saved, compressor = own.parent / "saved", Compressor(model, loss_target=9.0)
    checkpoint.save(saved, compressor, {})
    before = contents(saved)
    stale = {**model.structure(), "hidden": 30}
    monkeypatch.setattr(type(model), "structure", lambda self: stale)
    compressor.steps = 10
    with pytest.raises(UserError, match=r"'.*step-00000010' cannot be written: .* describe every"):
        checkpoint.save(saved, compressor, {})
    assert contents(saved) == before


def test_a_process_imports_the_files_by_itself(own: Path, tmp_path: Path) -> None:
    """The entry point of the command line, whose path does not have the user's folder."""
    code, _, err = run_process("train", own, "--out", tmp_path / "run", "--set", "train.steps=14")
    assert code == 0, err
    code, _, err = run_process("eval", tmp_path / "run", "--batches", "1")
    assert code == 0, err
    assert err.count("importing '") == 2


def test_a_found_structure_is_retrained(
    gaugelasso: Command, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file names the class that builds it, and task and model are found from any folder."""
    run = finish(own)
    monkeypatch.setattr(controls, "run_sweep", train_here)
    monkeypatch.chdir("/")
    assert gaugelasso("retrain", run, "--seeds", "8")[0] == 0
    again = read(run / "retrained" / "seed8" / "summary.json")
    assert again["method"] == "from scratch"
    assert again["structure"] == read(run / "summary.json")["structure"]


def test_a_model_of_the_user_is_squeezed(
    gaugelasso: Command, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = finish(own)
    monkeypatch.setattr(squeeze, "run_sweep", train_here)
    monkeypatch.chdir("/")
    words = ("--loss", "1e9", "--rounds", "1", "--set", "train.steps=200")
    assert gaugelasso("squeeze", run, *words)[0] == 0
    _, tried = read(run / "squeezed" / "squeeze.json")["rows"]
    hidden = [
        read(Path(one) / "summary.json")["structure"]["hidden"] for one in (run, tried["folder"])
    ]
    assert hidden[1] < hidden[0]


def test_a_model_of_the_user_is_pruned(gaugelasso: Command, own: Path) -> None:
    """The order of drops and the cut are generic over its table."""
    run = finish(own, compress__solver="fixed", target__loss="1e30", target__hold="pressed")
    full = read(run / "summary.json")
    options = ("--fma", str(full["fma_final"] / 2), "--rounds", "2", "--corrective", "2")
    assert gaugelasso("prune", run, *options, "--finetune", "20")[0] == 0
    summary = read(run / "pruned" / "summary.json")
    assert summary["method"] == "post-hoc"
    assert summary["fma_final"] <= full["fma_final"] / 2
    assert summary["structure"]["hidden"] < full["structure"]["hidden"] == 24
    for command in ("cofi", "torch-pruning"):
        answer = gaugelasso(command, run, "--fma", "9")
        assert_user_error(answer, "for the built-in transformer only")
