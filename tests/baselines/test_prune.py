"""Post-hoc pruning: the order of drops, rounds to a work target or a loss ceiling, resume."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gaugelasso.axes import named_tensors
from gaugelasso.baselines.efficiency import EfficiencyRanking, balanced
from gaugelasso.baselines.post_hoc import PrunePlan
from gaugelasso.baselines.pruning import PruneTrainer, prune_settings
from gaugelasso.baselines.source import Source
from gaugelasso.compress.compressor import Compressor
from gaugelasso.compress.drop import Decision
from gaugelasso.compress.options import CompressorOptions
from gaugelasso.compress.penalty import ranked
from gaugelasso.compress.ranking import DropPlanner
from gaugelasso.compress.result import TargetMissed
from gaugelasso.errors import UserError
from gaugelasso.models import Transformer, TransformerSpec
from gaugelasso.report import write_report
from gaugelasso.report.data import load_run
from gaugelasso.runs.checkpoint import load_model
from gaugelasso.runs.folder import Existing
from gaugelasso.runs.rotation import newest_first
from gaugelasso.tasks import Draw
from tests.command import Command, assert_user_error
from tests.tiny_runs import assert_same_run, contents, keep_images, read, rows, stop_at


def to_work(run: Path, fma: float, rounds: int = 4) -> PrunePlan:
    return PrunePlan(None, fma, rounds=rounds, channels=1, corrective=3, finetune=8)


def to_loss(loss: float) -> PrunePlan:
    return PrunePlan(loss, None, rounds=10, channels=1, corrective=2, finetune=20)


def start(
    run: Path, plan: PrunePlan, name: str = "pruned", existing: Existing = "refuse"
) -> PruneTrainer:
    source = Source.of(run)
    config = prune_settings(source, plan, {})
    return PruneTrainer(source, plan, config, run.parent / name, existing)


# --- the order ------------------------------------------------------------------------------


def test_the_least_efficient_channel_goes_first(run: Path) -> None:
    state = Compressor(load_model(run), 0.0).state
    state.balance_(pressing=False)
    ranking, order = EfficiencyRanking(state), ranked(state.utility(), state.prices)
    decision = ranking.next(1)
    _, name, index = next(row for row in order if not decision.keeps[row[1]][row[2]])
    position = [row[1:] for row in order].index((name, index))
    # Those before it are the strongest of their axes, which stay.
    for _, kept, strongest in order[:position]:
        assert strongest == int(state.utility()[kept].argmax())
    assert state.work_after(decision) < state.fma


def test_channels_are_ranked_in_the_balanced_gauge_and_cut_in_their_own(run: Path) -> None:
    trainer = start(run, to_work(run, 300))
    state = trainer.compressor.state
    mlp = trainer.model.get_submodule("operators.mlp_0")
    with torch.no_grad():  # the same function in a gauge far from balance
        mlp.get_parameter("up").mul_(4)
        mlp.get_parameter("down").mul_(1 / 4)
    was = {name: tensor.clone() for name, tensor in named_tensors(trainer.model).items()}
    work = trainer.pruning._round_work()
    assert work is not None
    with balanced(state):
        assert not torch.equal(mlp.get_parameter("up"), was["operators.mlp_0.up"])
        expected = EfficiencyRanking(state).to_work(work).dropped()
    assert all(torch.equal(tensor, was[n]) for n, tensor in named_tensors(trainer.model).items())
    assert EfficiencyRanking(state).to_work(work).dropped() != expected
    trainer.driver.before_step()
    assert trainer.compressor.history[0].dropped == expected
    # What is left has the values that it had: no factor of a balance.
    now = dict(trainer.model.named_parameters())
    assert [name for name in now if not torch.isin(now[name], was[name]).all()] == []
    assert any(now[name].shape != was[name].shape for name in now)
    trainer.folder.close()


@pytest.mark.parametrize("seed", range(4))
def test_an_index_that_the_model_needs_does_not_end_the_order(seed: int) -> None:
    """The strongest sites of embedding and classifier differ, so one of the two has to give way."""
    spec = TransformerSpec.uniform(
        width=8, layers=2, heads=4, kv_heads=2, d_k=4, d_v=4, d_f=6, length=6, inputs=8, outputs=8
    )
    model = Transformer(spec, seed)
    state = Compressor(model, 0.0).state
    ranking = EfficiencyRanking(state)
    first = ranking.work(ranking._most)
    least = ranking.least_work
    assert least <= first
    state.cut_(ranking.to_work(least), "in a test")
    assert (state.fma, len(model.operators), len(model.sites)) == (least, 0, 1)


def test_drops_to_a_work_are_no_more_than_it_needs(run: Path) -> None:
    state = Compressor(load_model(run), 0.0).state
    ranking = EfficiencyRanking(state)
    number = ranking._number_to(0.5 * state.fma)
    assert ranking.work(number) <= 0.5 * state.fma < ranking.work(number - 1)
    assert state.work_after(ranking.to_work(0.5 * state.fma)) == ranking.work(number)
    assert 0 < ranking.least_work < 0.2 * state.fma


def test_a_channel_that_takes_an_operator_along_waits_if_another_leads_nearer() -> None:
    spec = TransformerSpec.uniform(
        width=8, layers=2, heads=4, kv_heads=2, d_k=4, d_v=4, d_f=6, length=6, inputs=8, outputs=8
    )
    state = Compressor(Transformer(spec, 0), 0.0).state
    target = 0.4 * state.fma
    fewest = EfficiencyRanking(state).to_work(target)
    nearer = EfficiencyRanking(state).to_work(target, least=0.75 * target)
    assert state.work_after(fewest) < 0.5 * target
    assert 0.75 * target <= state.work_after(nearer) <= target
    assert len(nearer.removed) < len(fewest.removed)
    # Nothing is within such bounds: the target counts.
    out_of_reach = EfficiencyRanking(state).to_work(target, least=1.01 * target)
    assert out_of_reach.dropped() == fewest.dropped()


def test_a_round_removes_as_many_as_multiples_of_widths_need(run: Path) -> None:
    state = Compressor(load_model(run), 0.0, CompressorOptions(multiple=4)).state
    dropped = EfficiencyRanking(state).next(1).dropped()
    assert dropped
    widths = state.widths()
    assert all((widths[name] - count) % 4 == 0 for name, count in dropped.items() if name != "D")


# --- to a work target -----------------------------------------------------------------------


def test_work_falls_through_interpolated_targets(run: Path) -> None:
    full = read(run / "summary.json")
    target = 0.4 * full["fma_final"]
    trainer = start(run, to_work(run, target))
    summary = trainer.run()
    folder = trainer.folder.path
    events = rows(folder, "events.jsonl")
    assert [event["step"] for event in events] == [0, 3, 6, 9]
    for number, event in enumerate(events, start=1):
        wanted = full["fma_final"] + (target - full["fma_final"]) * number / 4
        assert event["fma"] <= wanted
        assert event["dropped"]
        # Balance changes no output, and the cut is what the batch then sees.
        assert event["loss_balanced"] == pytest.approx(event["loss_before"], rel=1e-3)
    assert (summary["method"], summary["held"]) == ("post-hoc", True)
    assert summary["fma_final"] <= target
    assert (summary["steps"], summary["frozen_step"]) == (4 * 3 + 8, 12)
    # The training of the full model is part of the method's work.
    work, steps = summary["training_work"], [full["fma_final"], *(e["fma"] for e in events)]
    assert work["own"] == sum(3 * fma for fma in steps[1:]) + 8 * steps[-1]
    assert work["before"] == full["training_fma"] == summary["source"]["training_fma"]
    assert work["total"] == work["own"] + work["before"] == summary["training_fma"]
    assert work["needs"] == "the run that it began with"
    assert summary["wall_s"] > full["wall_s"]
    rates = {row["step"]: row["lr"] for row in rows(folder, "metrics.jsonl")}
    assert rates[5] == trainer.train.lr_min < rates[15] < trainer.config.compress.lr
    assert load_model(folder).structure() == summary["structure"]


def test_a_round_may_have_nothing_left_to_remove(run: Path) -> None:
    """Multiples of widths let a round go below the work of the next one."""
    source = Source.of(run)
    plan = to_work(run, 0.6 * source.summary["fma_final"], rounds=8)
    config = prune_settings(source, plan, {"compress.multiple": "4"})
    summary = PruneTrainer(source, plan, config, run.parent / "pruned").run()
    assert summary["held"]
    assert len(rows(run.parent / "pruned", "events.jsonl")) < 8
    assert summary["pruning"]["rounds_made"] == 8


def test_a_killed_run_resumes_to_the_same_end(run: Path) -> None:
    """Killed within a round and within the fine-tuning."""
    plan = to_work(run, 0.4 * read(run / "summary.json")["fma_final"])
    whole, steps = start(run, plan, "whole"), (10, 17)
    keep_images(whole, *steps)
    whole.run()
    for step in steps:
        start(run, plan, str(step), "resume").run()
        assert_same_run(run.parent / "whole", run.parent / str(step))
    with pytest.raises(Exception, match=r"--resume: fma = 7, but the run in"):
        PruneTrainer(Source.of(run), to_work(run, 7), start_config(run, plan), run.parent / "10",
                     "resume")  # fmt: skip


def start_config(run: Path, plan: PrunePlan) -> Any:
    return prune_settings(Source.of(run), plan, {})


def test_a_work_that_rounds_have_lost_is_refused_before_the_fine_tuning(run: Path) -> None:
    trainer = start(run, to_work(run, 200))
    made = trainer.pruning.drops_to

    def none_left(work: float) -> Decision:
        """From the third round on nothing can go."""
        if trainer.compressor.steps < 6:
            return made(work)
        return Decision(DropPlanner(trainer.compressor.state).keep_all())

    trainer.pruning.drops_to = none_left  # type: ignore[method-assign]
    with pytest.raises(UserError, match=r"--fma 200 cannot be reached from the model of step 6"):
        trainer.run()
    assert trainer.compressor.steps == 6
    assert not (trainer.folder.path / "summary.json").exists()


def test_a_work_far_below_the_named_one_is_warned_of(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = start(run, to_work(run, 300))
    trainer.pruning.drops_to = (  # type: ignore[method-assign]
        lambda work: EfficiencyRanking(trainer.compressor.state).to_work(150)
    )
    trainer.driver.before_step()
    left = trainer.compressor.fma
    trainer.folder.close()
    assert left <= 150
    assert f"--fma 300: the round at step 0 leaves {left:,.0f} FMA per token" in caplog.text


# --- batches --------------------------------------------------------------------------------


def test_batches_go_on_where_those_of_the_full_model_ended(run: Path) -> None:
    full = read(run / "summary.json")
    trainer = start(run, to_work(run, 300))
    step, train = trainer.state.step, trainer.train
    step.load_(0)
    unseen = Draw(train.seed, full["steps"] * train.accumulate)
    inputs, _ = trainer.task.batch(train.batch, unseen, "cpu")
    assert torch.equal(step.inputs[0], inputs)
    summary = trainer.run()
    assert summary["source"]["batches"] == unseen.index
    # So does a method that begins with the pruned model.
    assert Source.of(trainer.folder.path).batches == (full["steps"] + summary["steps"])


def test_a_run_that_began_with_the_first_batch_goes_on_so(run: Path) -> None:
    """As runs of early versions did: their plan does not say where batches began."""
    trainer = start(run, to_work(run, 300))
    stop_at(trainer, 5)
    path = trainer.folder.path / "prune.json"
    plan = read(path)
    assert plan.pop("batches") == read(run / "summary.json")["steps"]
    path.write_text(json.dumps(plan))
    again = start(run, to_work(run, 300), existing="resume")
    assert again.state.step.draw(7).index == 7
    again.folder.close()


# --- to a loss ceiling ----------------------------------------------------------------------


def test_the_round_that_breaks_the_ceiling_is_undone(run: Path) -> None:
    full = read(run / "summary.json")
    ceiling = 1.3 * full["selection_loss"]
    trainer = start(run, to_loss(ceiling))
    measured = []
    evaluate = trainer.pruning._measure
    trainer.pruning._measure = lambda: measured.append(found := evaluate()) or found
    before = {}
    undo = trainer.pruning._undo_round

    def compare() -> None:
        undo()
        before["fma"], before["loss"] = trainer.compressor.fma, evaluate().loss

    trainer.pruning._undo_round = compare  # type: ignore[method-assign]
    try:
        summary = trainer.run()
    except TargetMissed:
        summary = read(trainer.folder.path / "summary.json")
    losses = [one.loss for one in measured]
    assert all(loss <= ceiling for loss in losses[:-1])
    assert losses[-1] > ceiling
    assert summary["pruning"]["rounds_made"] == len(losses) - 1 > 0
    *cuts, back = rows(trainer.folder.path, "events.jsonl")
    assert back["returned_to"] == cuts[-1]["step"]
    assert back["fma"] == before["fma"] == cuts[-1]["fma_before"] == summary["fma_final"]
    # To the state before the last cut: that at the end of the round before.
    assert before["loss"] == losses[-2]
    assert summary["structure_step"] == cuts[-2]["step"]


def test_a_stop_waits_for_the_end_of_a_round(run: Path) -> None:
    trainer = start(run, to_loss(1e6))
    driver = trainer.pruning
    settled = []
    for _ in range(5):
        trainer._step()
        settled.append(driver.settled)
        driver.advance()
    assert settled == [False, True, False, True, False]
    trainer.folder.close()


# --- the command ----------------------------------------------------------------------------


@pytest.mark.usefixtures("undrawn")
def test_the_command_writes_a_run_that_reports_know(gaugelasso: Command, run: Path) -> None:
    fma = str(0.5 * read(run / "summary.json")["fma_final"])
    options = ("--fma", fma, "--rounds", "2", "--corrective", "2", "--finetune", "20")
    code, output, err = gaugelasso("prune", run, *options)
    assert (code, err) == (0, "")
    out = run / "pruned"
    assert "run folder:" in output
    assert load_run(out).summary is not None
    assert write_report([out]).page.exists()
    assert gaugelasso("info", out)[0] == 0
    assert gaugelasso("eval", out, "--batches", "1")[0] == 0
    before = contents(out)
    assert_user_error(gaugelasso("prune", run, *options), "already")
    assert contents(out) == before
    code, output, _ = gaugelasso("prune", run, *options, "--resume")
    assert (code, "resuming after step 24" in output) == (0, True)
    # A misspelt folder is seen before the run is made a second time.
    code, output, _ = gaugelasso("prune", run, *options, "--resume", "--out", run / "prnued")
    assert (code, "no checkpoint to resume from; starting at step 0" in output) == (0, True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "--fma and --loss: give one of them; none is given"),
        (("--fma", "9", "--loss", "1"), "give one of them; both are given"),
        (("--fma", "nan"), "--fma nan: must be a finite number above 0"),
        (("--loss", "nan"), "--loss nan: must be a finite number"),
        (("--loss", "inf"), "--loss inf: must be a finite number"),
        (("--fma", "1e9"), "has 624 FMA per token already"),
        (("--fma", "2"), "--fma 2 cannot be reached by pruning"),
        (("--fma", "2"), "the nearest is"),
        (("--loss", "0.001"), "on selection data before it is pruned"),
        (
            ("--loss", "9", "--finetune", "3"),
            "--finetune 3: with the phases before it that makes 13 steps",
        ),
        (("--loss", "9", "--rounds", "3"), "--rounds 3: with --loss, rounds go on to the ceiling"),
        (("--fma", "300", "--channels", "2"), "--channels 2: with --fma, a round removes what"),
        (("--fma", "300", "--set", "compress.trust=4"), "makes no use of compress.trust"),
        (("--fma", "300", "--set", "compress.penalty=one_sided"), "no use of compress.penalty"),
        (("--fma", "300", "--set", "compress.rho=1"), "prune has no pressure"),
        (("--fma", "600", "--set", "task.length=3"), "prune takes task.length from its run"),
        (("--fma", "600", "--set", "train.steps=3"), "prune takes train.steps from its run"),
    ],
)
def test_what_cannot_be_pruned_is_refused(
    gaugelasso: Command, run: Path, options: tuple[str, ...], message: str
) -> None:
    assert_user_error(gaugelasso("prune", run, *options), message)
    assert not (run / "pruned").exists()


def test_an_unfinished_run_is_refused(gaugelasso: Command, run: Path) -> None:
    (run / "summary.json").unlink()
    assert_user_error(gaugelasso("prune", run, "--loss", "9"), "is not finished")


def test_older_weights_are_not_taken_for_those_of_the_run(run: Path) -> None:
    newest = newest_first(run / "checkpoints")[0]
    assert len(newest_first(run / "checkpoints")) > 1
    weights = newest / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(
        UserError, match=r"ended at step \d+, and its final model is lost: .*damaged"
    ):
        Source.of(run)


def test_the_weights_are_those_of_the_run(run: Path) -> None:
    trainer = start(run, to_loss(1e6))
    here, there = named_tensors(trainer.model), named_tensors(load_model(run))
    assert all(torch.equal(here[name], there[name]) for name in there)
    trainer.folder.close()
