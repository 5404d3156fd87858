"""Runs whose target is relative to the full model, which is trained first or named."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gaugelasso.compress.result import TargetMissed
from gaugelasso.config import run_config
from gaugelasso.config.target import TargetConfig
from gaugelasso.errors import UserError
from gaugelasso.report.advice import advise
from gaugelasso.report.data import load_run, run_folders
from gaugelasso.report.verdict import verdict
from gaugelasso.runs.folder import Existing
from gaugelasso.training.reference import with_reference
from gaugelasso.training.reference_file import load_reference
from gaugelasso.training.trainer import Trainer
from tests.command import Command
from tests.tiny import tiny, write_tiny
from tests.tiny_runs import Stop, assert_same_run, contents, read, rows, stop_at
from tests.training.target_runs import BRIEF, QUICK, start

ABOVE = TargetConfig(above_full=0.05)


def referred(
    folder: Path, target: TargetConfig = ABOVE, existing: Existing = "refuse", **changes: Any
) -> Trainer:
    """The trainer of a run, after its reference."""
    config = replace(tiny(folder, **QUICK, **changes), target=target)
    named = with_reference(config, folder / "run", existing)
    return Trainer(named, folder / "run", "resume")


def run_to_end(trainer: Trainer) -> dict[str, Any]:
    try:
        return trainer.run()
    except TargetMissed:
        return read(trainer.folder.path / "summary.json")


@pytest.fixture(scope="module")
def above_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    trainer = referred(tmp_path_factory.mktemp("above"))
    run_to_end(trainer)
    return trainer.folder.path


def test_the_full_model_is_trained_first_and_names_the_loss(above_run: Path) -> None:
    summary, full = read(above_run / "summary.json"), read(above_run / "reference" / "summary.json")
    assert full["fma_final"] == full["fma_initial"] == summary["fma_initial"]
    assert full["steps"] == summary["steps"] == 40
    assert summary["loss_target"] == pytest.approx(1.05 * full["selection_loss"])
    assert summary["held"] is (summary["loss"] <= summary["loss_target"])
    found = summary["reference"]
    assert found["origin"] == "measured"
    assert found["training_fma"] == full["training_fma"] == 40 * full["fma_initial"]
    work = summary["training_work"]
    assert (work["own"], work["before"]) == (summary["training_fma"], full["training_fma"])
    assert work["total"] == work["own"] + work["before"]
    assert work["needs"] == "the full model of target.above_full"
    assert full["training_work"]["total"] == full["training_fma"]
    assert found["named"].startswith(f"named {summary['loss_target']:.4g} = 1.05 x ")
    assert found["named"].endswith(f"measured in {above_run / 'reference'}")
    assert run_config(above_run).target.named == summary["loss_target"]
    assert found["named"] in verdict([load_run(above_run)])[1]
    assert load_run(above_run).loss_target == summary["loss_target"]


def test_a_run_killed_in_its_reference_goes_on_to_the_last_bit(
    above_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once in the reference, once right after it, once in the run itself."""
    take, die = Trainer._step, {"at": 24}

    def step(trainer: Trainer) -> Any:
        if trainer.compressor.steps == die["at"]:
            raise Stop
        return take(trainer)

    monkeypatch.setattr(Trainer, "_step", step)
    with pytest.raises(Stop):
        referred(tmp_path)
    assert not (tmp_path / "run" / "reference.json").exists()
    die["at"] = -1
    referred(tmp_path, existing="resume").folder.close()  # killed between both
    stop_at(referred(tmp_path, existing="resume"), 16)
    run_to_end(referred(tmp_path, existing="resume"))
    assert_same_steps(above_run, tmp_path / "run")
    assert_same_run(above_run / "reference", tmp_path / "run" / "reference")


def assert_same_steps(one: Path, other: Path) -> None:
    """Two runs in folders of different names, to which their summaries refer."""
    for name in ("metrics.jsonl", "events.jsonl"):
        assert rows(one, name) == rows(other, name)
    loss, again = (read(run / "summary.json")["selection_loss"] for run in (one, other))
    assert loss == again


def test_a_reference_is_a_part_of_its_run(above_run: Path, tmp_path: Path) -> None:
    shutil.copytree(above_run, tmp_path / "sweep" / "seed3")
    assert run_folders([tmp_path / "sweep"]) == [tmp_path / "sweep" / "seed3"]
    for path in (tmp_path / "sweep" / "seed3").iterdir():
        if path.is_file() and path.name != "config.json":
            path.unlink()
    with pytest.raises(
        UserError, match=r"the run has not begun, its reference is in '.*reference'"
    ):
        load_run(tmp_path / "sweep" / "seed3")
    assert run_folders([tmp_path / "sweep"]) == [tmp_path / "sweep"]


def test_a_run_is_overwritten_with_its_reference(above_run: Path, tmp_path: Path) -> None:
    shutil.copytree(above_run, tmp_path / "run")
    Trainer(tiny(tmp_path), tmp_path / "run", "overwrite").folder.close()
    assert not (tmp_path / "run" / "reference").exists()
    assert not (tmp_path / "run" / "reference.json").exists()


def test_another_setting_is_not_resumed(above_run: Path, tmp_path: Path) -> None:
    shutil.copytree(above_run, tmp_path / "run")
    before = contents(tmp_path / "run")
    with pytest.raises(UserError, match=r"--resume: target\.above_full = 0\.5, but the run began"):
        referred(tmp_path, TargetConfig(above_full=0.5), "resume")
    assert contents(tmp_path / "run") == before


def test_a_finished_run_may_be_the_reference(above_run: Path, tmp_path: Path) -> None:
    full = shutil.copytree(above_run / "reference", tmp_path / "full")
    target = TargetConfig(above_full=0.1, reference=str(full))
    trainer = referred(tmp_path, target, train__seed=8)
    trainer.folder.close()
    assert not (tmp_path / "run" / "reference").exists()
    found = load_reference(tmp_path / "run")
    assert found is not None
    assert (found.origin, found.folder, found.differs) == ("measured", str(full), ())
    assert trainer.config.target.named == pytest.approx(1.1 * found.loss)
    shutil.rmtree(full)  # the loss is known from now on
    again = referred(tmp_path, target, "resume", train__seed=8)
    again.folder.close()
    assert again.config == trainer.config


def test_a_reference_with_other_settings_is_an_estimate(above_run: Path, tmp_path: Path) -> None:
    target = TargetConfig(above_full=0.1, reference=str(above_run / "reference"))
    other = tiny(tmp_path, **(QUICK | {"train__steps": 80, "model__d_f": 6}))
    with_reference(replace(other, target=target), tmp_path / "run")
    found = load_reference(tmp_path / "run")
    assert found is not None
    assert (found.origin, found.differs) == ("estimated", ("model.d_f", "train.steps"))
    assert found.named(0.1).endswith("(other model.d_f, train.steps)")
    compressed = replace(tiny(tmp_path, **QUICK), target=replace(target, reference=str(above_run)))
    with_reference(compressed, tmp_path / "other")
    assert load_reference(tmp_path / "other").differs == (  # type: ignore[union-attr]
        "structure, as it was compressed",
    )


def test_a_reference_has_to_be_finished_and_above_zero(above_run: Path, tmp_path: Path) -> None:
    shutil.copytree(above_run / "reference", tmp_path / "full")
    target = TargetConfig(above_full=0.1, reference=str(tmp_path / "full"))
    summary = read(tmp_path / "full" / "summary.json")
    path = tmp_path / "full" / "summary.json"
    for loss, message in (
        (-0.25, r"which is -0\.25 on selection data .* name target\.loss instead"),
        (None, "has no selection_loss"),
    ):
        path.write_text(json.dumps({**summary, "selection_loss": loss}))
        with pytest.raises(UserError, match=message):
            referred(tmp_path, target)
    path.unlink()
    with pytest.raises(UserError, match=r"target\.reference = .* summary\.json is missing"):
        referred(tmp_path, target)
    assert not (tmp_path / "run").exists()


def test_a_trainer_needs_the_loss_of_the_full_model(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"target\.above_full needs the loss of the full model"):
        start(tmp_path, ABOVE)
    trainer = start(tmp_path, replace(ABOVE, reference_loss=2.0), changes=BRIEF)
    summary = run_to_end(trainer)
    assert summary["loss_target"] == pytest.approx(2.1)
    assert summary["reference"]["named"] == "named 2.1 = 1.05 x 2, given"


def test_the_command_tells_of_the_reference(tmp_path: Path, gaugelasso: Command) -> None:
    path = write_tiny(tmp_path)
    words = [f"{key.replace('__', '.')}={value}" for key, value in BRIEF.items()]
    words += ["target.hold=final", "target.above_full=1.0"]
    given = ["train", path, "--out", tmp_path / "run", *(w for c in words for w in ("--set", c))]
    code, out, error = gaugelasso(*given)
    assert code == 0, error
    assert f"first the reference: the full model without pressure, in '{tmp_path / 'run'}" in out
    assert "named " in out
    code, out, _ = gaugelasso(*given, "--resume")
    assert "first the reference" not in out
    assert "resuming after step 20" in out
    code, _, error = gaugelasso(*given)
    assert code == 2
    assert "already exists" in error
    settings_of_advice = advise([tmp_path / "run"]).config
    assert "reference_loss" not in settings_of_advice
    assert "above_full = 1.0" in settings_of_advice
