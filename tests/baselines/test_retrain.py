"""The command retrain: a found structure with new weights, for several seeds."""

from pathlib import Path

import pytest

from gaugelasso.cli import controls
from gaugelasso.report.data import load_run
from gaugelasso.runs.checkpoint import load_spec
from tests.baselines.in_process import train_here
from tests.command import Command, assert_user_error
from tests.tiny_runs import contents, finished, read


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(controls, "run_sweep", train_here)
    return finished(tmp_path)


def test_every_seed_is_a_run_of_the_found_structure(gaugelasso: Command, run: Path) -> None:
    code, output, err = gaugelasso("retrain", run, "--seeds", "5-6", "--jobs", "2")
    assert (code, err) == (0, "")
    found, own = load_spec(run), read(run / "summary.json")
    losses = []
    for seed in (5, 6):
        folder = run / "retrained" / f"seed{seed}"
        summary = read(folder / "summary.json")
        assert (summary["method"], summary["seed"]) == ("from scratch", seed)
        assert load_spec(folder / "initial.json") == load_spec(folder) == found
        assert summary["fma_final"] == own["fma_final"] == summary["fma_initial"]
        assert summary["training_fma"] == own["steps"] * own["fma_final"]
        losses.append(summary["loss"])
        assert load_run(folder).summary is not None
    assert losses[0] != losses[1]
    assert own["method"] == "compression"
    assert len(read(run / "retrained" / "results.json")["runs"]) == 2
    assert "| 5 |" in output
    assert gaugelasso("eval", run / "retrained" / "seed5", "--batches", "1")[0] == 0


def test_a_finished_seed_is_not_trained_again(gaugelasso: Command, run: Path) -> None:
    out = run.parent / "scratch"
    assert gaugelasso("retrain", run, "--out", out)[0] == 0
    before = (out / "seed3" / "metrics.jsonl").read_bytes()
    figures = read(out / "results.json")["runs"][0]
    assert gaugelasso("retrain", run, "--out", out, "--seeds", "3-4")[0] == 0
    assert (out / "seed3" / "metrics.jsonl").read_bytes() == before
    assert [one["seed"] for one in read(out / "results.json")["runs"]] == [3, 4]
    assert read(out / "results.json")["runs"][0]["loss"] == figures["loss"]


def test_what_cannot_be_retrained_is_refused(gaugelasso: Command, run: Path) -> None:
    wrong = ("retrain", run, "--set", "train.steps=3")
    assert_user_error(gaugelasso(*wrong), "retrain takes train.steps from its run")
    assert_user_error(gaugelasso("retrain", run, "--seeds", "5-x"), "--seeds '5-x': give numbers")
    assert not (run / "retrained").exists()
    out = run.parent / "other"
    out.mkdir()
    (out / "structure.json").write_text("{}")
    before = contents(out)
    answer = gaugelasso("retrain", run, "--out", out)
    assert_user_error(answer, "the folder holds the retrained runs of another run")
    assert contents(out) == before
    (run / "summary.json").unlink()
    assert_user_error(gaugelasso("retrain", run), "is not finished: summary.json is missing")
