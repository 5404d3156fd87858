"""The command retrain: a found structure with new weights, for several seeds."""

import json
from pathlib import Path
from typing import Any

import pytest

from gaugelasso.baselines.setting import plain_settings
from gaugelasso.baselines.squeeze import squeeze_settings
from gaugelasso.cli import controls
from gaugelasso.config import run_config
from gaugelasso.errors import UserError
from gaugelasso.report.data import load_run
from gaugelasso.report.toml import to_toml
from gaugelasso.runs.checkpoint import load_spec
from gaugelasso.runs.training_work import total_training
from tests.baselines import test_prune
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
        # The run that found the structure is part of what it took.
        work = summary["training_work"]
        assert (work["own"], work["before"]) == (summary["training_fma"], own["training_fma"])
        assert work["total"] == work["own"] + work["before"]
        assert work["needs"] == "the run that found the structure"
        losses.append(summary["loss"])
        assert load_run(folder).summary is not None
    assert losses[0] != losses[1]
    assert own["method"] == "compression"
    assert own["training_work"]["total"] == own["training_fma"]
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


def test_a_folder_of_an_early_version_goes_on(gaugelasso: Command, run: Path) -> None:
    """Its structure stands alone in its file, without the training behind it."""
    out = run.parent / "scratch"
    assert gaugelasso("retrain", run, "--out", out)[0] == 0
    (out / "structure.json").write_text(json.dumps(read(run / "summary.json")["structure"]))
    assert gaugelasso("retrain", run, "--out", out, "--seeds", "3-4")[0] == 0


def test_a_structure_without_a_past_has_an_unknown_total(gaugelasso: Command, run: Path) -> None:
    path = run.parent / "by_hand.json"
    path.write_text(json.dumps(read(run / "summary.json")["structure"]))
    config, out = run / "config.toml", run.parent / "again"
    assert total_training(read(run / "summary.json")) is not None
    text = to_toml(plain_settings(run, read(run / "summary.json"), {}, "x", ()).to_dict())
    config.write_text(text)
    assert gaugelasso("train", config, "--structure", path, "--out", out)[0] == 0
    work = read(out / "summary.json")["training_work"]
    assert (work["before"], work["total"]) == (None, None)
    path.write_text(json.dumps({"structure": {}, "training_work": {"total": "much"}}))
    answer = gaugelasso("train", config, "--structure", path, "--out", run.parent / "other")
    assert_user_error(answer, "training_work.total is not a number of 0 or more")


def test_what_cannot_be_retrained_is_refused(gaugelasso: Command, run: Path) -> None:
    wrong = ("retrain", run, "--set", "train.steps=3")
    assert_user_error(gaugelasso(*wrong), "retrain takes train.steps from its run")
    for key, message in (
        ("model.width=4", "retrain takes model.width from its run"),
        ("train.seed=4", "--set train.seed=4: leave it out; seeds are given by --seeds"),
        (
            "compress.rho=3",
            "--set compress.rho=3: retrain has no pressure and makes no use of compress.rho",
        ),
        ("compress.solver=fixed", "retrain has no pressure"),
        ("compress.trust=2", "retrain has no pressure and makes no use of compress.trust"),
        ("compress.sinkhorn_sweeps=1", "makes no use of compress.sinkhorn_sweeps"),
    ):
        assert_user_error(gaugelasso("retrain", run, "--set", key), message)
    assert_user_error(gaugelasso("retrain", run, "--seeds", "5-x"), "--seeds '5-x': give numbers")
    assert not (run / "retrained").exists()
    out = run.parent / "other"
    out.mkdir()
    (out / "structure.json").write_text("{}")
    before = contents(out)
    answer = gaugelasso("retrain", run, "--out", out)
    assert_user_error(answer, "the folder holds the retrained runs of another run")
    assert contents(out) == before
    sweep = run.parent / "sweep"
    (sweep / "seed3").mkdir(parents=True)
    (sweep / "seed3" / "config.json").write_text("{}")
    before = contents(sweep)
    answer = gaugelasso("retrain", run, "--out", sweep)
    assert_user_error(answer, "holds 'seed3' of another command; choose another --out")
    assert contents(sweep) == before
    other = run.parent / "scratch"
    assert gaugelasso("retrain", run, "--out", other)[0] == 0
    (other / "baseline.json").write_text("{}")
    answer = gaugelasso("retrain", run, "--out", other)
    assert_user_error(answer, "holds 'baseline.json' of another command; choose another --out")
    (run / "summary.json").unlink()
    assert_user_error(gaugelasso("retrain", run), "is not finished: summary.json is missing")


def test_a_rival_has_the_steps_of_its_full_model(tmp_path: Path) -> None:
    run = finished(tmp_path, compress__solver="fixed", target__loss=1e30)
    pruned = test_prune.start(run, test_prune.to_work(run, 300), "pruned")
    summary = pruned.run()
    settings = plain_settings(pruned.folder.path, summary, {}, "retrain", ("task",))
    full = read(run / "summary.json")
    assert settings.train.steps == full["steps"] + summary["steps"]
    assert settings.train.warmup == run_config(run).train.warmup > 0
    assert settings.train.cooldown == summary["steps"] - summary["frozen_step"] == 8
    again = squeeze_settings(pruned.folder.path, summary, {"compress.solver": "conservative"})
    assert (again.train.steps, again.train.warmup) == (settings.train.steps, settings.train.warmup)
    steps = {"compress.solver": "conservative", "train.steps": "30", "train.warmup": "3"}
    again = squeeze_settings(pruned.folder.path, summary, steps)
    assert (again.train.steps, again.train.warmup) == (30, 3)
    # Its own steps may be fewer than the full model's warm-up.
    short = summary | {"steps": 20, "frozen_step": 2}
    config = read(pruned.folder.path / "config.json")
    config["train"] |= {"steps": 20, "cooldown": 18, "warmup": 0}
    (pruned.folder.path / "config.json").write_text(json.dumps(config))
    few = plain_settings(pruned.folder.path, short, {}, "retrain", ("task",)).train
    assert (few.steps, few.warmup, few.cooldown) == (full["steps"] + 20, settings.train.warmup, 18)
    # Nor may a work target that was met in the warm-up leave too long an anneal.
    config["train"] |= {"steps": 20, "cooldown": 10, "warmup": 5}
    (pruned.folder.path / "config.json").write_text(json.dumps(config))
    early = {key: value for key, value in summary.items() if key != "source"}
    met = plain_settings(
        pruned.folder.path, early | {"steps": 20, "frozen_step": 1}, {}, "retrain", ("task",)
    )
    assert (met.train.steps, met.train.warmup, met.train.cooldown) == (20, 5, 15)
    del summary["source"]["schedule"]  # as early versions wrote it
    early = plain_settings(pruned.folder.path, summary, {}, "retrain", ("task",))
    assert early == settings
    run.rename(run.parent / "moved")
    assert squeeze_settings(pruned.folder.path, summary, steps).train.steps == 30
    with pytest.raises(UserError, match=r"no source\.schedule, .* or make this one again"):
        plain_settings(pruned.folder.path, summary, {}, "retrain", ("task",))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("frozen_step", "x", "'frozen_step' is not a whole number or null"),
        ("selection_loss", "x", "'selection_loss' is not a number or null"),
        ("source", {"training_fma": 1.0, "schedule": {"a": 1}}, "'source.schedule' is not a table"),
        ("source", {"training_fma": 1.0, "run": 3}, "'source.run' is not a string"),
        ("source", {"training_fma": 1.0, "batches": "x"}, "'source.batches' is not a whole number"),
    ],
)
def test_a_damaged_summary_is_named(
    gaugelasso: Command, run: Path, key: str, value: Any, message: str
) -> None:
    path = run / "summary.json"
    path.write_text(json.dumps(read(path) | {key: value}))
    for words in (("retrain", run), ("prune", run, "--loss", "1.5"), ("cofi", run, "--fma", "300")):
        assert_user_error(gaugelasso(*words), message)
    assert not any((run / name).exists() for name in ("retrained", "pruned", "cofi"))
