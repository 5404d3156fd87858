"""CoFi: runs to their target, resumed runs, and the command."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from gaugelasso.baselines.cofi import parameters
from gaugelasso.baselines.cofi_masks import FAMILIES
from gaugelasso.compress.result import TargetMissed
from gaugelasso.models import Transformer
from gaugelasso.runs.checkpoint import load_model
from tests.baselines.cofi_runs import finish, plan_of, start
from tests.command import Command, assert_user_error
from tests.tiny_runs import assert_same_run, read, rows


def test_a_run_ends_dense_at_its_target(run: Path) -> None:
    full = read(run / "summary.json")
    target = 0.5 * full["fma_final"]
    # With half as many steps, rounding decides whether a model this small reaches its target.
    plan = replace(plan_of(target), prune=160)
    trainer = start(run, plan, "cofi")
    summary = trainer.run()
    folder, found = trainer.folder.path, summary["cofi"]
    assert summary["method"] == "cofi"
    assert 0 < summary["fma_final"] == found["reached"] <= 1.02 * target
    (event,) = rows(folder, "events.jsonl")
    assert (event["step"], event["fma"]) == (plan.dense_at, summary["fma_final"])
    # Steps of the student, and a third of a step of the teacher for its forward pass.
    teacher = summary["steps"] * full["fma_final"] / 3
    own = plan.dense_at * full["fma_final"] + 10 * summary["fma_final"] + teacher
    assert summary["training_work"]["own"] == pytest.approx(own)
    assert summary["training_work"]["before"] == full["training_fma"]
    pruned = [row for row in rows(folder, "metrics.jsonl") if row["step"] <= plan.dense_at]
    assert [row["phase"] for row in pruned][:2] == ["warmup", "compression"]
    assert all(f"mask_{family}" in row for row in pruned for family in FAMILIES)
    assert pruned[-1]["lambda_1"] == pytest.approx(found["lambda_1"])
    assert found["masks"]["intermediate"] < 1
    assert found["lambda_1_per_1000_steps"] is not None
    assert "lambda_1" not in rows(folder, "metrics.jsonl")[-1]
    assert load_model(folder).structure() == summary["structure"]


def test_a_target_that_the_control_does_not_reach_is_said_with_the_nearest(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At the end, and before that as soon as the masks are made dense."""
    target = 0.5 * read(run / "summary.json")["fma_final"]
    trainer = start(run, replace(plan_of(target, rate=1e-4), prune=10), "cofi")
    seen: list[tuple[int, str]] = []
    trainer.log._on_progress = lambda progress: seen.append((progress.row["step"], caplog.text))
    with pytest.raises(
        TargetMissed, match=r"--fma 312 was not reached: the nearest is \d+; lambda"
    ) as missed:
        trainer.run()
    (said,) = [record.message for record in caplog.records]
    nearest = read(trainer.folder.path / "summary.json")["cofi"]["reached"]
    assert f"--fma 312 is missed: the masks made dense leave {nearest:,.0f}, and the" in said
    advice = "raise --prune (here 10) or --mask-rate (here 0.0001)"
    assert advice in said
    assert advice in str(missed.value)
    dense = trainer.plan.dense_at
    assert all(("is missed" in text) is (step > dense) for step, text in seen)
    assert {step > dense for step, _ in seen} == {True, False}
    summary = read(trainer.folder.path / "summary.json")
    assert summary["held"] is False
    assert summary["cofi"]["reached"] == summary["fma_final"] > 1.02 * target


def test_a_model_far_below_the_target_is_said(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As where a fast control closes whole blocks: that is no answer to the work asked for."""
    trainer = start(run, plan_of(400), "cofi")
    for found in (400.0, 300.0):
        trainer.cofi._check_met(found)
    assert caplog.text == ""
    trainer.cofi._check_met(299.0)
    (said,) = [record.message for record in caplog.records]
    assert "--fma 400: the masks made dense leave 299, far below that; lower --mask-rate" in said
    trainer.folder.close()


@pytest.mark.parametrize("layer_distill", [0.0, 1.0])
def test_a_killed_run_resumes_to_the_same_end(run: Path, layer_distill: float) -> None:
    """Killed with masks, and after they are made dense."""
    plan = plan_of(0.5 * read(run / "summary.json")["fma_final"], 0.5)
    plan = replace(plan, prune=25, layer_distill=layer_distill)
    steps = 23, 36
    finish(run, plan, "whole", kept=steps)
    for step in steps:
        finish(run, plan, str(step), "resume")
        assert_same_run(run.parent / "whole", run.parent / str(step))


def test_the_command_holds_the_number_of_parameters(gaugelasso: Command, run: Path) -> None:
    model = load_model(run)
    assert isinstance(model, Transformer)
    target = 0.8 * parameters(model)
    phases = ("--warmup", "5", "--prune", "90", "--finetune", "5", "--mask-rate", "0.1")
    code, _, err = gaugelasso("cofi", run, "--parameters", str(target), *phases)
    assert (code, err) == (0, "")
    summary = read(run / "cofi" / "summary.json")
    assert summary["held"]
    assert summary["cofi"]["objective"] == "parameters"
    again = load_model(run / "cofi")
    assert isinstance(again, Transformer)
    assert parameters(again) == summary["cofi"]["reached"] <= 1.02 * target
    assert gaugelasso("info", run / "cofi")[0] == 0
    assert gaugelasso("eval", run / "cofi", "--batches", "1")[0] == 0


@pytest.mark.parametrize(("given", "largest"), [((), 4.605), (("--mask-bound", "0"), 10.05)])
def test_the_command_bounds_the_masks(
    gaugelasso: Command, run: Path, given: tuple[str, ...], largest: float
) -> None:
    phases = ("--warmup", "5", "--prune", "10", "--finetune", "5", "--mask-rate", "0.0001")
    out = run.parent / "masks"
    answer = gaugelasso("cofi", run, "--fma", "300", *phases, *given, "--out", out)
    assert_user_error(answer, "--fma 300 was not reached")
    means = read(out / "summary.json")["cofi"]["masks"]
    # The mean probability that a mask is open, of families that begin open.
    expected = 1 / (1 + math.exp(-largest + 2 / 3 * math.log(0.1 / 1.1)))
    assert means["hidden"] == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "--fma and --parameters: give one of them; none is given"),
        (("--fma", "0"), "--fma 0: must be a finite number above 0"),
        (("--fma", "-1"), "--fma -1: must be a finite number above 0"),
        (("--fma", "nan"), "--fma nan: must be a finite number above 0"),
        (("--fma", "1e9"), "--fma 1e+09: must be above 0 and below the 624 of the model"),
        (("--parameters", "0"), "--parameters 0: must be above 0 and below the"),
        (("--fma", "3"), "--fma 3 cannot be reached by masks of"),
        (("--fma", "3"), "of residual sites without blocks: 1 of 8"),
        (("--fma", "300", "--distill", "1.5"), "--distill 1.5: must be a number from 0 to 1"),
        (("--fma", "300", "--mask-bound", "-1"), "--mask-bound -1: must be a finite number of at"),
        (("--fma", "300", "--mask-bound", "inf"), "--mask-bound inf: must be a finite number of"),
        (("--fma", "300", "--mask-rate", "0"), "--mask-rate 0: must be above 0 and at most 10"),
        (("--fma", "300", "--set", "compress.anchor=1"), "makes no use of compress.anchor"),
        (("--fma", "300", "--set", "train.probe=true"), "makes no use of train.probe"),
        (("--fma", "300", "--set", "compress.accounting=bytes"), "counts no work"),
    ],
)
def test_what_cannot_be_done_is_refused(
    gaugelasso: Command, run: Path, options: tuple[str, ...], message: str
) -> None:
    assert_user_error(gaugelasso("cofi", run, *options), message)
    assert not (run / "cofi").exists()
