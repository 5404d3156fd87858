"""A loop of the user's own writes a run folder, and goes on with it after a kill."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gaugelasso import (
    Compressor,
    CompressorOptions,
    MetricTarget,
    TargetMissedWarning,
    Transformer,
    TransformerSpec,
    UserError,
    load_model,
)
from gaugelasso.compress import time_budget
from gaugelasso.runs.reading import read_rows
from gaugelasso.tasks import SELECTION, Draw, Retrieval
from tests.command import Command, assert_user_error
from tests.examples import example
from tests.tiny_runs import CLOCK, finished, plain, read, sign

STEPS, NAMED = 80, 2.0
TASK = Retrieval(vocabulary=8, modulus=2, length=6)


def small() -> Transformer:
    spec = TransformerSpec.uniform(
        width=8, layers=1, heads=2, d_k=4, d_v=4, d_f=8, length=6, inputs=8, outputs=9
    )
    return Transformer(spec)


def loop(run: Path, killed_at: tuple[int, ...] = (), **changes: Any) -> Compressor:
    """Train to the end. What a kill after some steps would leave is copied beside the folder."""
    given: dict[str, Any] = {"loss_target": NAMED, "steps": STEPS, "record": run, **changes}
    given["options"] = CompressorOptions(lr=0.04, interval=5, trust=4.0)
    model = given.pop("model", None) or small()
    compressor = Compressor(model, **given)
    while compressor.steps < given["steps"]:
        if compressor.steps in killed_at and not image(run, compressor.steps).exists():
            # Without the lock, which names a process that lives on.
            lock = shutil.ignore_patterns("run.lock")
            shutil.copytree(run, image(run, compressor.steps), ignore=lock)
        inputs, targets = TASK.batch(8, Draw(0, compressor.steps), "cpu")
        compressor.step(
            lambda x=inputs, y=targets: F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        )
    compressor.finish()
    return compressor


def image(run: Path, steps: int) -> Path:
    """The folder of a loop that was killed after so many steps."""
    return run.with_name(f"{run.name}-{steps}")


def rows(run: Path, name: str) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in CLOCK} for row in read_rows(run / name)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("own") / "whole"
    loop(run, (10, 38, 75))
    return run


@pytest.mark.usefixtures("undrawn")
def test_it_is_a_run_folder_like_any_other(whole: Path, gaugelasso: Command) -> None:
    summary = read(whole / "summary.json")
    assert summary["held"]
    assert summary["fma_final"] < summary["fma_initial"]
    assert summary["loss"] <= NAMED == summary["loss_target"]
    assert plain(load_model(whole).structure()) == summary["structure"]
    assert [row["step"] for row in rows(whole, "metrics.jsonl")] == list(range(1, STEPS + 1))
    code, out, _ = gaugelasso("info", whole)
    assert code == 0
    assert f"{summary['fma_final']:,.0f}" in out
    assert gaugelasso("report", whole)[0] == 0
    assert (whole / "report" / "index.html").exists()


def test_a_row_has_phase_and_rate_of_its_steps(whole: Path) -> None:
    """Also where a stage ends: not those of the stage that follows."""
    logged = {row["step"]: (row["phase"], row["lr"]) for row in rows(whole, "metrics.jsonl")}
    trials = [step for step in logged if step > 1 and logged[step][0] == "trial"]
    starts = [step for step in trials if step - 1 not in trials]
    ends = [step for step in trials if step + 1 not in trials]
    # A trial begins at the full rate of the press before it, and ends near the least one.
    assert len(starts) == len(ends) == 3
    assert [logged[step][1] for step in starts] == [pytest.approx(0.04)] * 3
    assert all(logged[step][1] < 0.01 for step in ends)
    assert all(logged[step + 1][1] >= 0.029 for step in ends)


def test_a_summary_has_what_every_summary_has(whole: Path, tmp_path: Path) -> None:
    trained = read(finished(tmp_path) / "summary.json")
    summary = read(whole / "summary.json")
    assert summary.keys() == trained.keys()
    assert summary["precision"] == "float32"
    assert summary["frozen_step"] is None


def test_a_resumed_loop_knows_of_its_returns(tmp_path: Path) -> None:
    """Their number, and when the structure last changed: in the state that it went back to."""

    def doubtful() -> dict[str, Any]:
        """Small models have a loss of 9 on selection data."""
        model = small()
        return {"model": model, "evaluate": lambda: 9.0 if sizes(model) < 100 else 1.5}

    def sizes(model: Transformer) -> int:
        return sum(parameter.numel() for parameter in model.parameters())

    whole, resumed = tmp_path / "whole", tmp_path / "whole-65"
    loop(whole, (65,), **doubtful())
    loop(resumed, resume=True, **doubtful())
    one, other = (read(run / "summary.json") for run in (whole, resumed))
    events = rows(whole, "events.jsonl")
    back = [(e["step"], e["returned_to"]) for e in events if e["returned_to"] is not None]
    assert back[0] == (36, 21)
    assert back[-1][0] == STEPS  # the run ends on a state that it kept
    assert one["returns"] == other["returns"] == len(back)
    cuts = [e["step"] for e in events if e["dropped"] and e["step"] <= back[-1][1]]
    assert one["structure_step"] == other["structure_step"] == cuts[-1]
    assert one["held"]


@pytest.mark.parametrize("stop", [10, 38, 75])
def test_a_killed_loop_goes_on_exactly(whole: Path, tmp_path: Path, stop: int) -> None:
    run = Path(shutil.copytree(image(whole, stop), tmp_path / "run"))
    second = loop(run, resume=True)
    for name in ("metrics.jsonl", "events.jsonl"):
        assert rows(run, name) == rows(whole, name)
    mine, other = (read(each / "summary.json") for each in (run, whole))
    differing = {key for key in other if mine[key] != other[key]}
    assert differing <= {"wall_s"}
    pairs = zip(second.model.parameters(), load_model(whole).parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_with_a_time_budget_steps_are_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the ticks by which the course counts."""
    clock = [0.0]
    monkeypatch.setattr(time_budget.time, "monotonic", lambda: clock[0])
    run, model = tmp_path / "run", small()
    options = CompressorOptions(lr=0.04, interval=5, trust=4.0)
    # Before the first step, at the first trial and at the second, which returns.
    losses = [9.0, 1.5, 9.0]

    def evaluate() -> float:
        return losses.pop(0) if losses else 9.0  # so that the run ends on the first state

    compressor = Compressor(model, NAMED, options, seconds=20.0, record=run, evaluate=evaluate)
    while not compressor.done:
        inputs, targets = TASK.batch(8, Draw(0, compressor.steps), "cpu")
        compressor.step(
            lambda x=inputs, y=targets: F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        )
        clock[0] += 0.125
    with pytest.warns(TargetMissedWarning):
        compressor.finish()
    summary, events = read(run / "summary.json"), rows(run, "events.jsonl")
    back = [(e["step"], e["returned_to"]) for e in events if e["returned_to"] is not None]
    (kept,) = {to for _, to in back}
    assert (len(back), back[-1][0]) == (3, 160)
    assert summary["held_step"] == kept < back[0][0] < 80
    assert (run / "checkpoints" / f"step-{kept:08d}").exists()
    assert summary["structure_step"] <= kept


def test_the_config_has_the_interval_that_was_chosen(tmp_path: Path) -> None:
    """By the time of the first steps, after the config was first written."""
    run, model = tmp_path / "run", small()
    compressor = Compressor(model, 9.0, seconds=0.3, record=run)
    assert read(run / "config.json")["compress"]["interval"] == 100
    while not compressor.done:
        inputs, targets = TASK.batch(8, Draw(0, compressor.steps), "cpu")
        compressor.step(
            lambda x=inputs, y=targets: F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        )
    compressor.finish()
    written = read(run / "config.json")["compress"]["interval"]
    assert 10 <= written == compressor.options.interval < 100


def test_an_existing_folder_is_not_overwritten(whole: Path) -> None:
    before = (whole / "summary.json").read_bytes()
    with pytest.raises(UserError, match="the folder is not empty"):
        loop(whole)
    assert (whole / "summary.json").read_bytes() == before


def test_a_name_that_no_folder_can_have(tmp_path: Path) -> None:
    circle = tmp_path / "circle"
    circle.symlink_to(circle)
    for name in (circle, circle / "run", tmp_path / ("x" * 300)):
        with pytest.raises(UserError, match="cannot be made: "):
            Compressor(small(), NAMED, steps=STEPS, record=name)
    with pytest.raises(UserError, match=r"output 'a\\x00b' holds a null byte"):
        Compressor(small(), NAMED, steps=STEPS, record="a\0b")


def test_a_loop_starts_again_in_the_same_process(whole: Path, tmp_path: Path) -> None:
    """As in a notebook: the compressor of before is still there, and holds the folder."""
    run = tmp_path / "run"
    shutil.copytree(image(whole, 38), run)
    given: dict[str, Any] = {"loss_target": NAMED, "steps": STEPS, "record": run, "resume": True}
    given["options"] = CompressorOptions(lr=0.04, interval=5, trust=4.0)
    before, model = Compressor(small(), **given), small()
    assert loop(run, model=model, resume=True).steps == STEPS
    assert rows(run, "metrics.jsonl") == rows(whole, "metrics.jsonl")
    with pytest.raises(UserError, match="a later Compressor has taken over the run"):
        before.step(lambda: before.model(torch.zeros(1, 6, dtype=torch.long)).sum())


def test_a_model_or_a_target_that_cannot_be_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"Perceptron is defined .* could not be loaded"):
        Compressor(
            example("your_model").Perceptron(8, 4, 3), NAMED, steps=STEPS, record=tmp_path / "run"
        )
    with pytest.raises(UserError, match=r"fma_target = 1: no cut leads below 11 FMA per token"):
        Compressor(small(), steps=STEPS, fma_target=1.0, record=tmp_path / "run")
    # Nothing was written, so that the same folder can be used after the mistake is mended.
    assert not (tmp_path / "run").exists()
    assert Compressor(small(), NAMED, steps=STEPS, record=tmp_path / "run").steps == 0


def test_a_resume_with_other_settings_is_refused(whole: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(image(whole, 38), tmp_path / "run"))
    before = {path.name for path in run.iterdir()}
    with pytest.raises(UserError, match=r"target.loss = 1.0, but the run in .* began with 2.0"):
        loop(run, loss_target=1.0, resume=True)
    assert {path.name for path in run.iterdir()} == before  # no lock either


def test_a_folder_of_an_earlier_version_goes_on(whole: Path, tmp_path: Path) -> None:
    """It has nothing of returns: there, the events of the process counted."""
    run = Path(shutil.copytree(image(whole, 38), tmp_path / "run"))
    for path in (run / "checkpoints").iterdir():
        state = read(path / "state.json")
        for key in ("frozen_at", "ended_at", "fallback_step", "last_return_step", "returns",
                    "failed_returns"):  # fmt: skip
            del state[key]
        (path / "state.json").write_text(json.dumps(state))
        sign(path)
    loop(run, resume=True)
    assert rows(run, "metrics.jsonl") == rows(whole, "metrics.jsonl")


def test_a_folder_that_is_not_empty_is_refused_in_words_of_python(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"record = '.*run': the folder is not empty; give ") as no:
        Compressor(small(), loss_target=1.0, steps=40, record=tmp_path / "run")
    assert "resume=True" in str(no.value)
    assert "--" not in str(no.value)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["notes.txt"]


def test_commands_that_need_data_say_what_can_be_done(tmp_path: Path, gaugelasso: Command) -> None:
    run = tmp_path / "run"
    loop(run)
    for command in ("eval", "generate", "retrain"):
        answer = gaugelasso(command, run)
        assert_user_error(answer, f"{str(run)!r} is the record of a loop of your own")
        assert "use gaugelasso.load_model in Python" in answer[2]
        assert "gaugelasso eval --set task.module=FILE:NAME" in answer[2]
    keys = ("task.name=retrieval", "task.vocabulary=8", "task.modulus=2", "task.length=6")
    code, out, _ = gaugelasso("eval", run, *(part for key in keys for part in ("--set", key)))
    assert code == 0
    assert "loss" in out


def test_resume_needs_a_folder() -> None:
    with pytest.raises(UserError, match="record"):
        Compressor(small(), loss_target=1.0, steps=40, resume=True)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_loss_that_was_never_measured_is_null(tmp_path: Path) -> None:
    Compressor(small(), loss_target=1.0, steps=40, record=tmp_path / "run").finish()
    summary = read(tmp_path / "run" / "summary.json")
    assert summary["loss"] is summary["metric"]["value"] is None
    assert not summary["held"]


# --- other targets -------------------------------------------------------------------


def other_target(kind: str) -> dict[str, Any]:
    """The arguments of a loop that names a work, or an accuracy of 0.2."""
    if kind == "work":
        return {"loss_target": None, "fma_target": 300.0}
    model = small()
    inputs, targets = TASK.batch(64, Draw(0, stream=SELECTION), "cpu")

    def measured() -> tuple[Tensor, float]:
        outputs = model(inputs)
        accuracy = float((outputs.argmax(-1) == targets).float().mean())
        return F.cross_entropy(outputs.flatten(0, 1), targets.flatten()), accuracy

    named = {"loss_target": None, "metric_target": 0.2, "evaluate": measured}
    return {**named, "model": model}


@pytest.mark.parametrize("kind", ["work", "metric"])
def test_a_loop_may_name_something_else_than_a_loss(
    kind: str, tmp_path: Path, gaugelasso: Command
) -> None:
    run = tmp_path / "run"
    result = loop(run, (45,), **other_target(kind)).finish()
    summary = read(run / "summary.json")
    assert result.held
    assert summary["held"]
    assert result.loss_target is summary["loss_target"] is None
    assert result.fma < result.fma_initial
    if kind == "work":
        assert result.fma <= summary["fma_target"] == 300.0
        assert str(result).endswith("work target 300: held")
        assert 0 < summary["structure_step"] <= summary["frozen_step"] < STEPS
    else:
        assert result.metric is not None
        assert result.metric >= summary["metric_target"] == 0.2
        assert summary["metric"] == {"name": "metric", "value": result.metric}
        assert "named 0.2: held" in str(result)
    assert gaugelasso("info", run)[0] == 0
    other = image(run, 45)
    loop(other, resume=True, **other_target(kind))
    assert rows(run, "metrics.jsonl") == rows(other, "metrics.jsonl")


def test_a_loop_that_names_a_loss_and_a_work_needs_both(tmp_path: Path) -> None:
    with pytest.warns(TargetMissedWarning, match=r"fma_target = 11 was missed: the model"):
        result = loop(tmp_path / "run", loss_target=1.7, fma_target=11.0).finish()
    assert result.loss <= 1.7
    assert not result.held
    assert str(result).endswith("named 1.7: held; work target 11: MISSED")
    summary = read(tmp_path / "run" / "summary.json")
    assert (summary["held"], summary["loss_target"], summary["fma_target"]) == (False, 1.7, 11.0)


def test_a_loop_that_misses_another_target_warns(tmp_path: Path) -> None:
    with pytest.warns(TargetMissedWarning, match=r"fma_target = 11 was missed: the model"):
        loop(tmp_path, record=None, steps=24, **(other_target("work") | {"fma_target": 11.0}))
    with pytest.warns(TargetMissedWarning, match=r"metric_target = 1\.5 was missed: the model of"):
        loop(tmp_path, record=None, steps=24, **(other_target("metric") | {"metric_target": 1.5}))


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"metric_target": 0.9, "loss_target": math.nan}, "loss_target = nan: must be a finite number"),
    (
        {"metric_target": 0.9, "loss_target": 1.0, "fma_target": 9.0},
        "metric_target and fma_target = 9: give one",
    ),
    (
        {"metric_target": MetricTarget(0.9, loss=math.nan)},
        "the loss of metric_target = nan: must be a finite number",
    ),
    ({"metric_target": 0.9, "fma_target": 9.0}, "metric_target and fma_target = 9: give one"),
    ({"metric_target": 0.9, "evaluate": None}, "metric_target needs steps=.* and evaluate="),
    ({"metric_target": math.nan}, "metric_target = nan: must be a finite number"),
]


@pytest.mark.parametrize(("given", "message"), WRONG, ids=str)
def test_a_loop_names_what_goes_together(given: dict[str, Any], message: str) -> None:
    known: dict[str, Any] = {"steps": 40, "evaluate": lambda: (1.0, 0.5)}
    with pytest.raises(UserError, match=message):
        Compressor(small(), **(known | given))


def test_a_metric_has_to_be_measured(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"evaluate returned 1\.0; with metric_target it must"):
        loop(tmp_path, **(other_target("metric") | {"evaluate": lambda: 1.0}))
