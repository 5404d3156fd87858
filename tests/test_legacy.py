"""Run folders that version 0.1.0 wrote (commit 1c8adc6) load, resume and report as they did.

Each folder of tests/legacy holds one run twice: `stopped`, as a kill left it, and `ended`, as the
same version completed it from there. Written on one CPU thread; see `environment.json`.
"""

import json
import platform
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from gaugelasso import load_model
from gaugelasso.config import Config, run_config
from gaugelasso.runs.reading import read_rows
from gaugelasso.training.evaluation import evaluate
from gaugelasso.training.trainer import Trainer
from tests.command import Command
from tests.tiny_runs import assert_same_run, final_tensors, read, rows

LEGACY = Path(__file__).parent / "legacy"
NEW = {"selection_loss", "evaluated_on", "costs", "method"}
RUNS = sorted(path.name for path in LEGACY.iterdir())


def config_of(run: Path) -> Config:
    return run_config(run)


def same_arithmetic(run: Path) -> bool:
    """Whether this machine adds in the same order: the same libraries on the same kind of CPU."""
    before = read(run / "environment.json")
    return before["torch"] == torch.__version__ and platform.machine() in before["platform"]


@pytest.fixture(params=RUNS)
def legacy(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    shutil.copytree(LEGACY / request.param, tmp_path / request.param)
    return tmp_path / request.param


def test_a_stopped_run_resumes_to_the_same_end(legacy: Path) -> None:
    stopped, ended = legacy / "stopped", legacy / "ended"
    steps = [row["step"] for row in read_rows(stopped / "metrics.jsonl")]
    Trainer(config_of(stopped), stopped, "resume").run()
    summary, before = (read(run / "summary.json") for run in (stopped, ended))
    assert summary["steps"] == before["steps"] > max(steps)
    assert summary["structure"] == before["structure"]
    if same_arithmetic(ended):
        # Version 0.1.0 had one held-out stream; its loss now decides, and another is reported.
        assert summary["selection_loss"] == before["loss"]
        for run, figures in ((stopped, summary), (ended, before)):
            kept = {k: v for k, v in figures.items() if k not in NEW | {"loss", "metric", "held"}}
            (run / "summary.json").write_text(json.dumps(kept))
        assert_same_run(stopped, ended)
    else:
        now, then = (rows(run, "metrics.jsonl") for run in (stopped, ended))
        assert [row["loss"] for row in now] == pytest.approx([row["loss"] for row in then], 1e-2)


def test_a_finished_run_resumes_to_itself(legacy: Path) -> None:
    ended = legacy / "ended"
    before = final_tensors(ended)
    Trainer(config_of(ended), ended, "resume").run()
    after = final_tensors(ended)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_its_model_loads(legacy: Path) -> None:
    ended = legacy / "ended"
    config, summary = config_of(ended), read(ended / "summary.json")
    model = load_model(ended)
    assert json.loads(json.dumps(model.structure())) == summary["structure"]
    loss, metric, _ = evaluate(model, config, config.train.final_batches, "cpu")
    assert loss == pytest.approx(summary["loss"], rel=1e-4)
    assert metric == pytest.approx(summary["metric"]["value"], rel=1e-4)


@pytest.mark.parametrize("state", ["stopped", "ended"])
def test_the_commands_read_it(
    legacy: Path, state: str, gaugelasso: Command, request: pytest.FixtureRequest
) -> None:
    # The plain run has nothing to draw that the others have not.
    if state == "stopped" or legacy.name == "plain":
        request.getfixturevalue("undrawn")
    run = legacy / state
    for words in (["info", run], ["report", run], ["eval", run, "--device", "cpu"]):
        code, _, err = gaugelasso(*words)
        assert code == 0, (words, err)
    assert (run / "report" / "index.html").exists()


def test_its_figures_are_in_the_report(legacy: Path, gaugelasso: Command) -> None:
    summary: dict[str, Any] = read(legacy / "ended" / "summary.json")
    _, out, _ = gaugelasso("info", legacy / "ended")
    assert f"{summary['fma_final']:,.0f}" in out
