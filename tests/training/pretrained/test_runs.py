"""Runs that begin with the weights of an imported model."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from gaugelasso.axes import named_tensors
from gaugelasso.compress.pricing import ACCOUNTINGS, total_fma
from gaugelasso.config import Config
from gaugelasso.config.base import BaseModel
from gaugelasso.errors import UserError
from gaugelasso.runs.checkpoint import load_model
from gaugelasso.tasks import Tokens
from gaugelasso.training.trainer import Trainer
from tests.command import Command, assert_user_error
from tests.importing.bases import CONTEXT, LAYERS, WIDTH, write_base
from tests.tiny_runs import assert_same_run, contents, read, stop_at
from tests.training.pretrained.configs import CONFIG, COURSE, MODEL, config
from tests.training.spoilers import returns

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


def test_the_base_is_not_overwritten(place: Path, gaugelasso: Command) -> None:
    before = contents(place / "base")
    for flag in ("--overwrite", "--resume"):
        answer = gaugelasso("train", "run.toml", "--out", "base", flag)
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
    run: Path, place: Path, gaugelasso: Command
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
        assert_user_error(gaugelasso("train", "work.toml", "--out", out, *more), message)
    assert contents(run) == before
    assert not Path("new").exists()
    # A fresh model has still to be trained.
    options = ("--set", "train.distill=0", "--set", "compress.removal=pressure")
    answer = gaugelasso("train", "work.toml", "--structure", run, "--out", "fresh", *options)
    assert answer[0] == 0, answer[2]
    less = ("--set", f"target.fma={0.95 * work}", "--set", "train.steps=40")
    answer = gaugelasso("train", "work.toml", "--out", "new", *less)
    assert answer[0] == 0, answer[2]
    assert read(Path("new/summary.json"))["fma_final"] <= 0.95 * work


def test_a_run_that_ends_on_its_start_says_so(place: Path) -> None:
    """Every step after the first spoils the weights, so that no trial has the target loss."""
    (place / "run.toml").write_text(MODEL + COURSE)
    trainer = Trainer(config(target__loss=6.0, target__fma=0.0), Path("run"))
    take = trainer._step

    def one() -> Any:
        event = take()
        if trainer.compressor.steps > 1:
            trainer.compressor.optimizer.store.weight.mul_(1.5)
        return event

    trainer._step = one  # type: ignore[method-assign]
    summary = trainer.run()
    assert returns(Path("run"))[-1] == (40, 1)
    assert summary["held"]
    assert summary["held_step"] == 1
    assert summary["fma_final"] == summary["fma_initial"]
