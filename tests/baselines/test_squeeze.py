"""The command squeeze: smaller models from the structure of a run, at the same loss."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gaugelasso.baselines import squeeze
from gaugelasso.baselines.setting import Bar
from gaugelasso.baselines.squeeze import Goal, Squeeze, squeeze_settings
from gaugelasso.compress.courses.metric_target import MetricTarget
from gaugelasso.config import run_config
from gaugelasso.runs.checkpoint import load_spec
from gaugelasso.sweeps.arms import ArmOutcome
from gaugelasso.sweeps.sweep import Plan
from tests.baselines.in_process import train_here
from tests.command import Command, assert_user_error
from tests.tiny_runs import contents, finished, read

STEPS = ("--set", "train.steps=60", "--set", "train.warmup=4", "--set", "train.cooldown=20")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(squeeze, "run_sweep", train_here)
    return finished(tmp_path, target__loss=1.9)


def test_a_try_begins_with_the_smallest_structure_so_far(gaugelasso: Command, run: Path) -> None:
    # Any loss will do, so every try that becomes smaller is the next origin.
    code, output, err = gaugelasso("squeeze", run, "--loss", "9", "--rounds", "3", *STEPS)
    assert (code, err) == (0, "")
    result = read(run / "squeezed" / "squeeze.json")
    first, *tries = result["rows"]
    assert first["folder"] == str(run)
    assert first["work"] == read(run / "summary.json")["fma_final"]
    assert 1 <= len(tries) <= 3
    best = first
    for row in tries:
        folder, origin = Path(row["folder"]), Path(row["from"])
        assert origin == Path(best["folder"])
        assert load_spec(folder / "initial.json") == load_spec(origin)
        config = run_config(folder)
        assert config.target.loss is None
        assert 0.69 < config.target.fma / best["work"] < 0.9
        assert config.train.steps == 60
        assert config.task == run_config(run).task
        assert row["held"]
        assert row["work"] == read(folder / "summary.json")["fma_final"]
        best = min(best, row, key=lambda one: one["work"])
    assert best is not first
    assert result["smallest"] == best["folder"]
    assert result["training_fma"] == sum(row["training_fma"] for row in tries)
    assert f"Model: {best['folder']}" in output
    assert f"| {len(tries)} |" in output
    assert gaugelasso("eval", Path(best["folder"]), "--batches", "1")[0] == 0


def test_finished_tries_are_not_trained_again(
    gaugelasso: Command, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("squeeze", run, "--loss", "9", "--rounds", "2", *STEPS)
    assert gaugelasso(*words)[0] == 0
    before = read(run / "squeezed" / "squeeze.json")["rows"]
    monkeypatch.setattr(squeeze, "run_sweep", lambda *_: pytest.fail("trained again"))
    assert gaugelasso(*words)[0] == 0
    assert read(run / "squeezed" / "squeeze.json")["rows"] == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--step", "0.5"), "--step: the tries in "),
        (("--loss", "8"), "have limit = 9.0, and now it is 8.0; give the same options"),
        (("--seeds", "2"), "have seeds = 1, and now it is 2"),
        (("--jobs", "2"), "have at_once = 1, and now it is 2"),
    ],
)
def test_other_options_do_not_replace_what_was_found(
    gaugelasso: Command, run: Path, words: tuple[str, str], message: str
) -> None:
    start = ("squeeze", run, "--loss", "9", "--rounds", "1", *STEPS)
    assert gaugelasso(*start)[0] == 0
    before = contents(run / "squeezed")
    assert_user_error(gaugelasso(*start, *words), message)
    assert contents(run / "squeezed") == before
    assert gaugelasso(*start, "--rounds", "2")[0] == 0
    assert len(read(run / "squeezed" / "squeeze.json")["rows"]) == 3


def test_a_run_that_ended_early_is_tried_with_all_of_its_steps(run: Path) -> None:
    """As one that has its loss and its work before the last step: its tries have their own end."""
    summary = read(run / "summary.json")
    steps = run_config(run).train.steps
    assert squeeze_settings(run, {**summary, "steps": steps // 2}, {}).train.steps == steps


def test_fewer_rounds_lose_no_try(gaugelasso: Command, run: Path) -> None:
    words = ("squeeze", run, "--loss", "9", *STEPS)
    assert gaugelasso(*words, "--rounds", "2")[0] == 0
    before = read(run / "squeezed" / "squeeze.json")
    assert gaugelasso(*words, "--rounds", "1")[0] == 0
    after = read(run / "squeezed" / "squeeze.json")
    assert [after[key] for key in ("rows", "smallest")] == [before["rows"], before["smallest"]]


def test_where_no_try_keeps_the_loss_the_run_stays(gaugelasso: Command, run: Path) -> None:
    code, output, _ = gaugelasso("squeeze", run, "--loss", "-1", "--rounds", "1", *STEPS)
    result = read(run / "squeezed" / "squeeze.json")
    assert code == 0
    assert result["smallest"] == str(run)
    assert [row["held"] for row in result["rows"]] == [False, False]
    assert "No smaller model has the target, and the run of " in output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--step", "0.95"), "--step 0.95: must be above 0 and below 0.9"),
        (("--step", "nan"), "--step nan: must be above 0"),
        (("--loss", "nan"), "--loss nan: must be a finite number"),
        (("--set", "train.seed=4"), "squeeze takes train.seed from its run"),
        (("--set", "target.loss=1"), "squeeze takes target.loss from its run"),
        (("--set", "model.width=4"), "squeeze takes model.width from its run"),
        (("--set", "compress.accounting=bytes"), "squeeze takes compress.accounting from its run"),
        (("--set", "train.final_batches=1"), "squeeze takes train.final_batches from its run"),
    ],
)
def test_bad_options_are_refused(
    gaugelasso: Command, run: Path, words: tuple[str, str], message: str
) -> None:
    assert_user_error(gaugelasso("squeeze", run, *words), message)
    assert not (run / "squeezed").exists()


def test_runs_that_cannot_be_squeezed_are_refused(gaugelasso: Command, run: Path) -> None:
    out = run / "squeezed"
    out.mkdir()
    (out / "structure.json").write_text("{}")
    assert_user_error(gaugelasso("squeeze", run), "holds the squeezed runs of another run")
    assert list(contents(out)) == ["structure.json"]
    config = read(run / "config.json")
    config["compress"] |= {"solver": "fixed", "rho": 0.0}
    (run / "config.json").write_text(json.dumps(config))
    assert_user_error(gaugelasso("squeeze", run), "was trained without pressure")
    summary = read(run / "summary.json")
    (run / "summary.json").write_text(json.dumps(summary | {"held": False}))
    words = ("squeeze", run, "--set", "compress.solver=conservative")
    assert_user_error(gaugelasso(*words), "squeeze needs a run that held its target")
    assert list(contents(out)) == ["structure.json"]


def test_what_is_no_folder_for_tries_stays_as_it_is(gaugelasso: Command, run: Path) -> None:
    before = contents(run)
    assert_user_error(gaugelasso("squeeze", run, "--out", run), "is a run folder; choose another")
    shutil.rmtree(run / "checkpoints")
    assert gaugelasso("squeeze", run)[0] == 2
    assert contents(run) == {k: v for k, v in before.items() if not k.startswith("checkpoints")}


@pytest.mark.parametrize(("named", "held"), [(0.1, True), (1.1, False)])
def test_a_metric_that_the_run_names_must_hold(
    gaugelasso: Command, run: Path, named: float, held: bool
) -> None:
    config = read(run / "config.json")
    config["target"] |= {"metric": named, "loss": None, "hold": "final"}
    (run / "config.json").write_text(json.dumps(config))
    assert gaugelasso("squeeze", run, "--loss", "9", "--rounds", "1", *STEPS)[0] == 0
    _, tried = read(run / "squeezed" / "squeeze.json")["rows"]
    assert read(Path(tried["folder"]) / "summary.json")["selection_metric"] > 0.1
    assert tried["held"] is held


def test_a_try_that_diverges_misses(
    gaugelasso: Command, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other seed decides; where every seed fails, the command says so."""

    def one_fails(plan: Plan, console: Console) -> list[ArmOutcome]:
        done = train_here(replace(plan, seeds=plan.seeds[:1]), console)
        return [replace(one, failed=list(plan.seeds[1:])) for one in done]

    monkeypatch.setattr(squeeze, "run_sweep", one_fails)
    words = ("squeeze", run, "--loss", "9", "--rounds", "1", "--seeds", "2", *STEPS)
    code, output, err = gaugelasso(*words)
    assert (code, err) == (0, "")
    rows = read(run / "squeezed" / "squeeze.json")["rows"]
    assert [row["held"] for row in rows] == [True, True, False]
    assert (rows[2]["work"], rows[2]["loss"]) == (None, None)
    assert "seed4: failed, see its log" in output
    monkeypatch.setattr(
        squeeze, "run_sweep", lambda plan, _: [ArmOutcome(plan.arms[0], failed=[3, 4])]
    )
    answer = gaugelasso(*words, "--out", run.parent / "other")
    assert_user_error(answer, "2 of 2 runs failed: work ")


def search(
    run: Path, jobs: int, least: float, patch: pytest.MonkeyPatch, seeds: Sequence[int] = (3,),
    least_work: float = 100.0,
) -> Squeeze:  # fmt: skip
    """A search in which a model has as much work as it names, and the loss from `least` on.

    Each further seed needs a hundred less.
    """

    def trained(plan: Plan, console: Console) -> list[ArmOutcome]:
        for arm in plan.arms:
            work = float(arm.changes[0].removeprefix("target.fma="))
            for place, seed in enumerate(plan.seeds):
                folder = arm.run_folder(seed)
                folder.mkdir(parents=True)
                loss = 0.5 if work >= least - 100 * place else 2.0
                summary = read(run / "summary.json")
                summary |= {"fma_final": work, "selection_loss": loss, "seed": seed}
                (folder / "summary.json").write_text(json.dumps(summary))
        return [ArmOutcome(arm, list(plan.seeds)) for arm in plan.arms]

    patch.setattr(squeeze, "run_sweep", trained)
    patch.setattr(squeeze, "load_model", lambda _: None)
    patch.setattr(squeeze, "least_work", lambda *_: least_work)
    summary = read(run / "summary.json") | {"fma_final": 1000.0}
    (run / "summary.json").write_text(json.dumps(summary))
    plan = Plan(run / "config.toml", seeds, [], jobs)
    goal = Goal(Bar(1.0))
    return Squeeze(run, run_config(run), run / "squeezed", goal, plan, 0.7)


def quiet(rows: list[dict[str, Any]], best: dict[str, Any]) -> None:
    pass


def works(found: Squeeze) -> list[int]:
    return [round(row["work"]) for row in found.rows]


def test_steps_become_smaller_where_a_try_misses(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = search(run, 1, 550.0, monkeypatch)
    rounds: list[list[dict[str, Any]]] = []
    best = found.run(9, Console(), lambda rows, _: rounds.append(rows))
    # 490 and 490 again from 586 miss; below a tenth no step is tried.
    assert works(found) == [700, 490, 586, 490]
    assert [row["held"] for (row,) in rounds] == [True, False, True, False]
    assert round(best["work"]) == 586
    again = search(run, 1, 550.0, monkeypatch)
    assert again.run(2, Console(), quiet)["work"] == 700


def test_jobs_try_several_works_at_once(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = search(run, 3, 350.0, monkeypatch)
    assert round(found.run(1, Console(), quiet)["work"]) == 490
    assert works(found) == [700, 490, 343]
    # No cut leads below 100, so nothing is tried there.
    found = search(run, 9, 900.0, monkeypatch)
    found.run(1, Console(), quiet)
    assert min(works(found)) == 118
    # Where no cut leads a whole step down, a smaller one is taken.
    found = search(run, 1, 0.0, monkeypatch, least_work=800.0)
    assert round(found.run(1, Console(), quiet)["work"]) == 837


def test_one_of_the_seeds_must_have_the_loss(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = search(run, 4, 550.0, monkeypatch, seeds=(3, 4))
    best = found.run(1, Console(), quiet)
    # Four jobs of two seeds try two works at once.
    assert works(found) == [700, 700, 490, 490]
    assert [row["held"] for row in found.rows] == [True, True, False, True]
    assert (round(best["work"]), best["seed"]) == (490, 4)
    assert Path(best["folder"]).name == "seed4"


def test_a_named_metric_must_hold_too() -> None:
    goal = Goal(Bar(1.0), MetricTarget(0.9))
    assert goal.reached_by({"selection_loss": 0.5, "selection_metric": 0.95})
    assert not goal.reached_by({"selection_loss": 0.5, "selection_metric": 0.85})
    assert not goal.reached_by({"selection_loss": 0.5, "selection_metric": None})
    assert not goal.reached_by({"selection_loss": None, "selection_metric": 0.95})
    assert Goal(Bar(1.0), MetricTarget(1.5, lower_is_better=True)).reached_by(
        {"selection_loss": 0.5, "selection_metric": 1.4}
    )
