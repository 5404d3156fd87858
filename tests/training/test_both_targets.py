"""Runs that name a loss and a metric: both must hold, and everything that is said names both."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gaugelasso import MetricTarget, Result, TargetMissedWarning, UserError
from gaugelasso.baselines.setting import loss_of, uniform_settings
from gaugelasso.compress.result import TargetMissed
from gaugelasso.config.target import TargetConfig
from gaugelasso.report import write_report
from gaugelasso.report.advice import advise
from gaugelasso.report.data import load_run
from gaugelasso.report.verdict import verdict
from gaugelasso.training.evaluation import HeldOut
from gaugelasso.training.missed import missed_message
from gaugelasso.training.records import RunRecord, outcome_of
from tests.command import Command, assert_user_error
from tests.tiny import tiny, write_tiny
from tests.tiny_runs import assert_same_run, keep_images, read
from tests.training.target_runs import (
    BRIEF,
    KILLED,
    QUICK,
    assert_a_spoiled_end_gives_way,
    course_of,
    start,
)
from tests.training.test_own_loop import STEPS, image, loop, other_target
from tests.training.test_own_loop import rows as loop_rows

BOTH = TargetConfig(loss=1.7, metric=0.3)


@pytest.fixture(scope="module")
def both_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    trainer = start(tmp_path_factory.mktemp("both"), BOTH)
    keep_images(trainer, KILLED)
    trainer.run()
    return trainer.folder.path


# --- a run of the trainer ------------------------------------------------------------


def test_both_are_named_and_held(both_run: Path) -> None:
    summary, course = read(both_run / "summary.json"), course_of(both_run)
    assert (summary["loss_target"], summary["metric_target"]) == (1.7, 0.3)
    assert summary["loss"] <= 1.7
    assert summary["selection_metric"] >= 0.3
    assert summary["held"] is True
    assert summary["fma_final"] < 0.8 * summary["fma_initial"]
    assert summary["target_reached_step"] < 20
    # The metric was met above the target loss too; that did not do.
    assert max(loss for loss, met in course["pairs"] if met) > 1.7


@pytest.mark.parametrize(
    ("target", "missed", "sentence"),
    [
        (
            TargetConfig(loss=1e-3, metric=0.1),
            r"target\.loss = 0\.001 was missed in 20 steps: accuracy .* Name another target\.loss,",
            "The training loss never reached the loss target of 0.001; held-out loss {loss:.4g}; "
            "accuracy {metric:.3%} on selection data, which meets the target of 10.000%; ",
        ),
        (
            TargetConfig(loss=9.0, metric=1.0),
            r"target\.metric = 1 was missed in 20 steps: accuracy .* Name another target\.metric,",
            "Held-out loss {loss:.4g}, within the loss target of 9; "
            "accuracy {metric:.3%} on selection data, which misses the target of 100.000%; ",
        ),
        (
            TargetConfig(loss=1e-3, metric=1.0),
            r"target\.loss = 0\.001 and target\.metric = 1 were missed in 20 steps: accuracy is .* "
            r"Name another target\.loss and target\.metric, or raise train\.steps",
            "The training loss never reached the loss target of 0.001; held-out loss {loss:.4g}; "
            "accuracy {metric:.3%} on selection data, which misses the target of 100.000%; ",
        ),
    ],
    ids=["loss", "metric", "both"],
)
def test_one_of_them_is_not_enough(
    target: TargetConfig, missed: str, sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(TargetMissed, match=missed):
        start(tmp_path, target, changes=BRIEF).run()
    summary = read(tmp_path / "run" / "summary.json")
    assert summary["held"] is False
    held, said = verdict([load_run(tmp_path / "run")])
    assert held is False
    assert said.startswith(
        sentence.format(loss=summary["loss"], metric=summary["selection_metric"])
    )
    with pytest.raises(UserError, match=r"target\.loss is .*, its metric is .* target\.metric is"):
        loss_of(tmp_path / "run", summary)
    assert "a higher target.loss" not in " ".join(advise([tmp_path / "run"]).lines)


@pytest.mark.parametrize(
    ("test_loss", "selection_metric", "held"),
    [(1.7, 0.3, True), (1.71, 0.3, False), (1.7, 0.29, False), (float("nan"), 0.3, False)],
)
def test_test_data_decide_on_the_loss_and_selection_data_on_the_metric(
    test_loss: float, selection_metric: float, held: bool, tmp_path: Path
) -> None:
    config = replace(tiny(tmp_path, **QUICK), target=BOTH)
    test, selection = HeldOut(test_loss, 0.0, {}), HeldOut(0.0, selection_metric, {})
    compressor: Any = None  # a work target alone asks for it
    judged = outcome_of(config, compressor, test, selection).judged
    assert judged["held"] is held
    alone = replace(config, target=TargetConfig(metric=0.3))
    judged = outcome_of(alone, compressor, test, selection).judged
    assert judged["held"] is (selection_metric >= 0.3)
    assert judged["loss_target"] is None


def test_the_direction_of_the_metric_is_that_of_the_task(both_run: Path) -> None:
    summary = {**read(both_run / "summary.json"), "loss": 9.0, "selection_metric": 0.2}
    said = missed_message(RunRecord(), summary, "checkpoints", lower_is_better=True)
    assert said.startswith("target.loss = 1.7 was missed")
    said = missed_message(RunRecord(), summary, "checkpoints")
    assert said.startswith("target.loss = 1.7 and target.metric = 0.3 were missed")


def test_a_final_model_that_misses_the_loss_gives_way_to_one_that_has_both(
    both_run: Path, tmp_path: Path
) -> None:
    assert_a_spoiled_end_gives_way(both_run, tmp_path)


def test_a_killed_run_goes_on_to_the_last_bit(both_run: Path, tmp_path: Path) -> None:
    shutil.copytree(both_run.with_name(str(KILLED)), tmp_path / "run")
    start(tmp_path, BOTH, existing="resume").run()
    assert_same_run(both_run, tmp_path / "run")
    assert course_of(both_run) == course_of(tmp_path / "run")


def test_another_loss_or_none_is_not_resumed(both_run: Path, tmp_path: Path) -> None:
    shutil.copytree(both_run, tmp_path / "run")
    for loss in (1.8, None):
        with pytest.raises(UserError, match=rf"--resume: target\.loss = {loss}, but the run began"):
            start(tmp_path, TargetConfig(loss=loss, metric=0.3), existing="resume")


@pytest.mark.usefixtures("undrawn")
def test_a_report_names_both(both_run: Path, tmp_path: Path) -> None:
    loaded, summary = load_run(both_run), read(both_run / "summary.json")
    assert (loaded.loss_target, loaded.metric_target) == (1.7, 0.3)
    page = write_report([both_run], tmp_path / "report").page.read_text()
    held, sentence = verdict([loaded])
    assert held is True
    assert sentence.startswith(
        f"Held-out loss {summary['loss']:.4g}, within the loss target of 1.7; accuracy "
    )
    assert "on selection data, which meets the target of 30.000%; " in sentence
    assert sentence in page
    assert "target 1.7 and accuracy target 30.000%" in page
    assert "first batch within the loss target" in page
    assert advise([both_run]).verdict == sentence


def test_a_baseline_takes_the_loss_of_the_run(both_run: Path) -> None:
    summary = read(both_run / "summary.json")
    assert loss_of(both_run, summary) == summary["selection_loss"]
    settings = uniform_settings(both_run, summary, {})
    assert (settings.target.metric, settings.target.hold) == (None, "pressed")


# --- the command line ----------------------------------------------------------------


def test_the_command_line_names_both(tmp_path: Path, gaugelasso: Command) -> None:
    given = {**QUICK, "target__hold": "final", "target__loss": 1.7, "target__metric": 0.3}
    words = [f"{key.replace('__', '.')}={value}" for key, value in given.items()]
    command = ["train", write_tiny(tmp_path), "--out", tmp_path / "run"]
    command += [word for change in words for word in ("--set", change)]
    refused = gaugelasso(*command, "--set", "target.fma=300")
    assert_user_error(refused, "target.metric and target.fma = 300: give one of them")
    refused = gaugelasso(*command, "--set", "target.above_full=0.1")
    assert_user_error(refused, "target.loss = 1.7 and target.above_full = 0.1 and target.metric")
    assert not (tmp_path / "run").exists()
    code, out, error = gaugelasso(*command)
    assert code == 0, error
    assert "1.7 at the end)" in out
    assert "(target 0.3)" in out
    assert "within the loss target of 1.7; accuracy" in out
    code, out, _ = gaugelasso("info", tmp_path / "run")
    assert code == 0
    assert "which meets the target of 30.000%" in out
    command[3] = tmp_path / "missed"
    answer = gaugelasso(*command, "--set", "target.metric=1.0", "--set", "train.steps=20")
    assert_user_error(answer, "target.metric = 1 was missed in 20 steps")


# --- a loop of the user's own --------------------------------------------------------


def test_a_loop_names_both_and_goes_on_exactly(tmp_path: Path, gaugelasso: Command) -> None:
    run = tmp_path / "run"
    named = {"loss_target": 2.0}
    result = loop(run, (45,), **(other_target("metric") | named)).finish()
    summary = read(run / "summary.json")
    assert result.held is summary["held"] is result.metric_held is True
    assert result.loss <= result.loss_target == summary["loss_target"] == 2.0
    assert result.metric is not None
    assert result.metric >= summary["metric_target"] == 0.2
    assert result.fma < result.fma_initial
    assert str(result).endswith(f"named 2: held; metric {result.metric:.4g}, named 0.2: held")
    code, out, _ = gaugelasso("info", run)
    assert code == 0
    assert "within the loss target of 2; metric" in out
    other = image(run, 45)
    loop(other, resume=True, **(other_target("metric") | named))
    assert loop_rows(run, "metrics.jsonl") == loop_rows(other, "metrics.jsonl")
    assert course_of(run) == course_of(other)
    alone = shutil.copytree(other, tmp_path / "alone")
    with pytest.raises(UserError, match=r"resume: target\.loss = None, but the run in .* 2\.0"):
        loop(Path(alone), resume=True, **other_target("metric"))


def test_a_metric_target_may_bring_its_loss(tmp_path: Path) -> None:
    """As loss_target beside it would: the same steps."""
    results = []
    for named in (
        {"loss_target": 2.0, "metric_target": 0.2},
        {"metric_target": MetricTarget(0.2, loss=2.0)},
    ):
        compressor = loop(tmp_path, record=None, steps=40, **(other_target("metric") | named))
        results.append(compressor.finish())
    assert results[0] == results[1]
    assert results[0].loss_target == 2.0


@pytest.mark.parametrize(
    ("named", "missed", "end"),
    [
        (
            {"loss_target": 1e-3, "metric_target": 0.0},
            r"^loss_target = 0\.001 was missed: the model of .* name a higher loss, or give more",
            "named 0: held",
        ),
        (
            {"loss_target": 9.0, "metric_target": 1.5},
            r"^metric_target = 1\.5 was missed: the model of .* name another metric, or give more",
            "named 1.5: MISSED",
        ),
        (
            {"loss_target": 1e-3, "metric_target": 1.5},
            r"^loss_target = 0\.001 and metric_target = 1\.5 were missed: the model of .* "
            r"name a higher loss and another metric, or give more steps",
            "named 1.5: MISSED",
        ),
    ],
    ids=["loss", "metric", "both"],
)
def test_a_loop_that_misses_one_says_which(
    named: dict[str, float], missed: str, end: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with pytest.warns(TargetMissedWarning, match=missed):
        result = loop(run, steps=24, **(other_target("metric") | named)).finish()
    assert result.held is read(run / "summary.json")["held"] is False
    assert str(result).endswith(end)
    assert not verdict([load_run(run)])[0]


@pytest.mark.parametrize(
    ("named", "missed", "end"),
    [
        (
            {"loss_target": 1e-3, "fma_target": 1e9},
            r"^loss_target = 0\.001 was missed: .* name a loss above that, or give more steps",
            "named 0.001: MISSED; work target 1,000,000,000: held",
        ),
        (
            {"loss_target": 1e-3, "fma_target": 11.0},
            r"^loss_target = 0\.001 and fma_target = 11 were missed: the model ends at .* name a "
            r"higher loss and a larger fma_target, or give more steps$",
            "named 0.001: MISSED; work target 11: MISSED",
        ),
    ],
    ids=["loss", "both"],
)
def test_a_loop_that_misses_loss_or_work_says_which(
    named: dict[str, float], missed: str, end: str
) -> None:
    with pytest.warns(TargetMissedWarning, match=missed):
        result = loop(Path(), record=None, steps=24, **named).finish()
    assert str(result).endswith(end)
    assert result.work_held is (named["fma_target"] == 1e9)


def test_a_result_of_a_metric_alone_says_what_it_said() -> None:
    result = Result(
        held=False, loss=0.3, loss_target=None, metric=0.5, metric_target=0.9, metric_held=False,
        measured_on="held-out data", steps=STEPS, fma_initial=352.0, fma=99.0,
        parameters_initial=384, parameters=108, widths={},
    )  # fmt: skip
    assert str(result).endswith("held-out data; metric 0.5, named 0.9: MISSED")
    assert result.missed_message() == (
        "metric_target = 0.9 was missed: the model of 99 FMA per token ends at a metric of 0.5 and "
        "a loss of 0.3 after 80 steps; name another metric, or give more steps"
    )
