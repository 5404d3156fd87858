"""One run from config to summary: what it does and what it leaves behind."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from gaugelasso.compress.compressor import Compressor
from gaugelasso.config.plain import plain as plain_config
from gaugelasso.models import Transformer
from gaugelasso.runs import checkpoint
from gaugelasso.runs.reading import read_rows
from gaugelasso.tasks import Draw
from gaugelasso.training.records import Progress
from gaugelasso.training.trainer import TargetMissed, Trainer
from tests.tiny import tiny
from tests.tiny_runs import (
    finish,
    finished,
    newest,
    read,
    rows,
    start,
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny run, finished."""
    return finished(tmp_path_factory.mktemp("trainer"))


# --- the folder ----------------------------------------------------------------------


def test_the_folder_is_complete(run: Path) -> None:
    assert {path.name for path in run.iterdir()} == {
        "config.json", "environment.json", "initial.json", "metrics.jsonl", "events.jsonl",
        "resumed.jsonl", "summary.json", "checkpoints",
    }  # fmt: skip


def test_the_config_is_the_resolved_one(run: Path, tmp_path: Path) -> None:
    assert read(run / "config.json") == tiny(tmp_path).to_dict()


def test_the_environment_says_what_a_figure_needs(run: Path) -> None:
    environment = read(run / "environment.json")
    needed = ("command", "commit", "date", "hardware", "python", "torch", "numpy", "gaugelasso")
    assert set(needed) <= environment.keys()
    assert environment["torch"] == torch.__version__
    assert "CPU" in environment["hardware"]


def test_the_summary_carries_the_outcome(run: Path) -> None:
    summary, initial = read(run / "summary.json"), read(run / "initial.json")
    assert (summary["task"], summary["seed"], summary["steps"]) == ("retrieval", 3, 40)
    assert summary["accounting"] == "fma"
    assert summary["fma_initial"] == initial["fma"]
    assert summary["fma_final"] < summary["fma_initial"]
    assert summary["compression"] == summary["fma_initial"] / summary["fma_final"]
    assert summary["metric"]["name"] == "accuracy"
    assert 0 < summary["metric"]["value"] <= 1
    assert math.isfinite(summary["loss"])
    assert summary["wall_s"] > 0
    assert summary["structure"] == read(newest(run) / "structure.json")


def test_the_summary_says_what_would_go_next(run: Path) -> None:
    summary = read(run / "summary.json")
    rows = summary["next_to_go"]
    assert len(rows) == 10
    assert all(0 <= row["index"] < summary["widths"][row["axis"]] for row in rows)
    assert all(row["price"] > 0 for row in rows)
    shares = [row["utility_per_fma"] for row in rows]
    assert shares == sorted(shares)
    assert shares[-1] > 0


def test_the_summary_says_when_the_target_was_reached(run: Path) -> None:
    # With one step a row the log shows every loss.
    fine = finish(run.parent, "fine", train__log_every=1)
    losses = [row["loss"] for row in rows(fine, "metrics.jsonl")]
    first = next(step for step, loss in enumerate(losses, 1) if loss <= 2.0)
    assert first > 1
    assert read(fine / "summary.json")["target_reached_step"] == first
    assert read(run / "summary.json")["target_reached_step"] == first


def test_rows_come_at_their_interval(run: Path) -> None:
    metrics = rows(run, "metrics.jsonl")
    assert [row["step"] for row in metrics] == list(range(5, 41, 5))
    phases = ["compression"] * 6 + ["cooldown"] * 2
    assert [row["phase"] for row in metrics] == phases
    # Held-out data is looked at every second row, and the last look stays in the log.
    assert metrics[0]["accuracy"] is None
    assert metrics[1]["accuracy"] == metrics[2]["accuracy"]
    assert [row["lr"] for row in metrics[:6]] == [0.04] * 6
    assert metrics[6]["lr"] > metrics[7]["lr"] > 0


def test_rows_follow_the_structure(run: Path) -> None:
    sizes = {0: read(run / "initial.json")["fma"]}
    sizes |= {event["step"]: event["fma"] for event in rows(run, "events.jsonl")}
    for row in rows(run, "metrics.jsonl"):
        assert row["fma"] == sizes[max(step for step in sizes if step <= row["step"])]
    last, model = row, checkpoint.load_model(run)
    assert last["parameters"] == sum(p.numel() for p in model.parameters())
    assert (last["sites"], last["operators"]) == (len(model.sites), len(model.operators))


# --- events --------------------------------------------------------------------------


def test_events_carry_each_drop(run: Path) -> None:
    events, initial = rows(run, "events.jsonl"), read(run / "initial.json")
    assert sum(bool(event["dropped"]) for event in events) >= 2
    widths, fma = initial["widths"], initial["fma"]
    for event in events:
        assert event["step"] % 5 == 0
        assert event["fma_before"] == fma
        assert event["prices"].keys() == event["dropped"].keys()
        assert all(count > 0 for count in event["dropped"].values())
        assert all(price > 0 for price in event["prices"].values())
        assert (event["fma"] < fma) == bool(event["dropped"])
        assert event["fma"] >= fma - sum(event["prices"].values())
        left = {name: width - event["dropped"].get(name, 0) for name, width in widths.items()}
        assert event["widths"] == {name: width for name, width in left.items() if width}
        assert event["loss_before"] == pytest.approx(event["loss_balanced"], rel=1e-3)
        assert event["loss_after"] > 0
        widths, fma = event["widths"], event["fma"]
    assert read(run / "summary.json")["fma_final"] == fma
    assert read(run / "summary.json")["widths"] == widths


def test_an_event_without_a_cut_leaves_the_captured_step_as_it_is(tmp_path: Path) -> None:
    """`rebuilds` is what a step goes by, to be captured anew."""
    compressor = start(tmp_path).compressor
    before = compressor.state.rebuilds
    assert not compressor.event_().dropped
    assert compressor.state.rebuilds == before
    with torch.no_grad():
        for name, weight in compressor.model.named_parameters():
            if ".mlp_0." in name:
                weight.zero_()
    assert compressor.event_().dropped
    assert compressor.state.rebuilds == before + 1


def test_without_a_probe_losses_are_not_known(tmp_path: Path) -> None:
    run = finished(tmp_path, train__probe=False)
    events = rows(run, "events.jsonl")
    assert events
    for event in events:
        assert [event[f"loss_{when}"] for when in ("before", "balanced", "after")] == [None] * 3


def test_looking_changes_nothing(tmp_path: Path) -> None:
    """A probe that may hold back no drop only looks."""
    seen, blind = finished(tmp_path, "seen"), finished(tmp_path, "blind", train__probe=False)
    assert read(seen / "config.json")["train"]["probe"]
    assert read(seen / "config.json")["compress"]["drop_tolerance"] == 1e9
    assert rows(seen, "metrics.jsonl") == rows(blind, "metrics.jsonl")


def test_every_event_leaves_multiples(tmp_path: Path) -> None:
    """Of channels: a head's two pairs are four. The stream may have any width."""
    events = rows(finish(tmp_path, compress__multiple=4), "events.jsonl")
    assert any(event["dropped"] for event in events)
    for event in events:
        for name, width in event["widths"].items():
            channels = 2 * width if name.endswith("d_k") else width
            assert name == "D" or channels % 4 == 0, name


# --- phases --------------------------------------------------------------------------


def test_cooldown_freezes_the_structure(run: Path) -> None:
    events = rows(run, "events.jsonl")
    assert [event["step"] for event in events if event["step"] > 30] == []
    assert events[-1]["step"] == 30
    cold = [row for row in rows(run, "metrics.jsonl") if row["phase"] == "cooldown"]
    assert {row["fma"] for row in cold} == {events[-1]["fma"]}
    assert {row["rho"] for row in cold} == {0.0}


def test_warmup_does_not_press(tmp_path: Path) -> None:
    run = finish(tmp_path, train__warmup=30)
    assert rows(run, "events.jsonl") == []
    assert {row["rho"] for row in rows(run, "metrics.jsonl")} == {0.0}
    assert read(run / "summary.json")["compression"] == 1.0


def test_a_met_work_target_freezes_and_anneals(tmp_path: Path) -> None:
    run = finish(tmp_path, target__fma=450, train__saturation=7, train__steps=60)
    summary, metrics = read(run / "summary.json"), rows(run, "metrics.jsonl")
    frozen = summary["frozen_step"]
    assert frozen < 50
    assert summary["steps"] == frozen + 7
    assert summary["fma_final"] <= 450
    small = [row for row in metrics if row["fma"] <= 450 and row["loss"] <= 2.0]
    met = small[1]  # the first one's steps were those before the cut
    assert met["step"] == frozen
    after = [row for row in metrics if row["step"] > frozen]
    assert {row["phase"] for row in after} == {"cooldown"}
    assert {row["fma"] for row in after} == {met["fma"]}
    assert after[-1]["lr"] < 0.5 * met["lr"]
    assert max(event["step"] for event in rows(run, "events.jsonl")) <= frozen
    assert read(newest(run) / "state.json")["steps"] == summary["steps"]


def test_a_met_work_target_waits_for_the_loss(tmp_path: Path) -> None:
    """Work that is small enough from the start: nothing presses until a loss holds."""
    goal = {"target__fma": 1e6, "target__loss": 1.35, "train__saturation": 3}
    always = {"compress__solver": "fixed", "compress__rho": 1.0}
    run = finish(tmp_path, train__log_every=1, train__batch=16, **goal, **always)
    metrics = rows(run, "metrics.jsonl")
    assert {row["rho"] for row in metrics} == {0.0}
    losses = {row["step"]: row["loss"] for row in metrics}
    held = next(step for step, loss in losses.items() if step >= 4 and loss <= 1.35)
    assert held > 5
    assert read(run / "summary.json")["frozen_step"] == held


def test_without_saturation_a_met_work_target_is_annealed_for_the_cooldown(tmp_path: Path) -> None:
    run = finish(tmp_path, target__fma=450, train__steps=60)
    summary = read(run / "summary.json")
    assert summary["steps"] == summary["frozen_step"] + 10 < 60
    assert rows(run, "metrics.jsonl")[-1]["phase"] == "cooldown"


def test_without_any_anneal_the_run_ends_where_the_target_is_met(tmp_path: Path) -> None:
    run = finish(tmp_path, target__fma=450, train__steps=60, train__cooldown=0)
    summary = read(run / "summary.json")
    assert summary["steps"] == summary["frozen_step"] < 50
    assert read(newest(run) / "state.json")["steps"] == summary["steps"]
    assert read(newest(run) / "structure.json") == summary["structure"]


def test_an_unmet_work_target_changes_nothing_on_the_way(run: Path) -> None:
    with pytest.raises(TargetMissed, match=r"target\.fma = 11 was not reached in 40 steps"):
        finish(run.parent, "far", target__fma=11.0, train__saturation=7)
    assert rows(run.parent / "far", "metrics.jsonl") == rows(run, "metrics.jsonl")


# --- one step ------------------------------------------------------------------------


def by_hand(folder: Path, batches: list[tuple[Tensor, Tensor]], **changes: Any) -> Compressor:
    """One step of a fresh model on the mean loss of the batches."""
    config = tiny(folder, **changes)
    model = Transformer(config.model.spec(config.task), config.train.seed)
    compressor = Compressor(model, config.target.loss, config.compress)
    compressor.set_pressure_(False)
    compressor.set_lr_(0.01)
    loss = torch.stack([config.task.loss(model(x), y) for x, y in batches]).mean()
    loss.backward()
    compressor.step(loss)
    return compressor


def test_accumulation_is_the_mean_of_the_micro_batches(tmp_path: Path) -> None:
    trainer = start(tmp_path, train__accumulate=2)
    trainer._step()
    micro = [trainer.task.batch(4, Draw(3, k), "cpu") for k in (0, 1)]
    # lr 0.04 over a warm-up of four steps: 0.01 at the first.
    joined = [tuple(torch.cat(pair) for pair in zip(*micro, strict=True))]
    stepped = trainer.compressor.optimizer.store.weight
    for batches in (micro, joined):
        hand = by_hand(tmp_path, batches)  # type: ignore[arg-type]
        torch.testing.assert_close(stepped, hand.optimizer.store.weight, rtol=1e-4, atol=1e-6)
    # The first micro-batch alone steps elsewhere.
    alone = by_hand(tmp_path, micro[:1])
    assert not torch.allclose(stepped, alone.optimizer.store.weight, atol=1e-3)


def test_the_logged_loss_is_the_mean_of_the_micro_batches(tmp_path: Path) -> None:
    trainer = start(tmp_path, train__accumulate=3)
    with torch.no_grad():
        pairs = [trainer.task.batch(4, Draw(3, k), "cpu") for k in range(3)]
        losses = [trainer.task.loss(trainer.model(x), y) for x, y in pairs]
    trainer._step()
    trainer.driver.read_losses()
    assert trainer.record.unlogged == [pytest.approx(float(sum(losses)) / 3)]


def test_micro_batches_are_never_repeated(tmp_path: Path) -> None:
    trainer = start(tmp_path, train__accumulate=3)
    seeds = [trainer.state.step.draw(step, micro) for step in range(20) for micro in range(3)]
    assert len(set(seeds)) == 60


def test_bfloat16_runs_on_a_cpu(run: Path, tmp_path: Path) -> None:
    half = finish(tmp_path, train__precision="bfloat16")
    assert read(half / "summary.json")["precision"] == "bfloat16"
    assert read(run / "summary.json")["precision"] == "float32"
    model = load_file(newest(half) / "model.safetensors")
    assert {t.dtype for t in model.values() if t.is_floating_point()} == {torch.float32}
    first, full = (rows(folder, "metrics.jsonl")[0]["loss"] for folder in (half, run))
    assert first != full
    assert first == pytest.approx(full, rel=0.05)


def test_adam_trains(tmp_path: Path) -> None:
    changes = {"compress__lr": 0.01, "target__loss": 0.1, "train__steps": 60, "train__batch": 16}
    with pytest.raises(TargetMissed):
        finish(tmp_path, compress__optimizer="adam", **changes)
    losses = [row["loss"] for row in rows(tmp_path / "run", "metrics.jsonl")]
    assert losses[-1] < losses[0] - 0.7


def test_progress_shows_every_row(tmp_path: Path) -> None:
    seen = []
    trainer = Trainer(tiny(tmp_path), tmp_path / "run", on_progress=seen.append)
    trainer.run()
    assert [progress.row for progress in seen] == list(read_rows(tmp_path / "run/metrics.jsonl"))
    last = seen[-1]
    assert (last.end, last.loss_target, last.metric_name) == (40, 2.0, "accuracy")
    assert last.fma_initial == trainer.compressor.fma_initial
    assert (seen[0].seconds_left > 0, last.seconds_left) == (True, 0)


def test_plain_training_shows_no_loss_target(tmp_path: Path) -> None:
    seen: list[Progress] = []
    config = plain_config(tiny(tmp_path), steps=20, cooldown=5)
    Trainer(config, tmp_path / "run", on_progress=seen.append).run()
    assert config.target.loss == 1e30
    assert {progress.loss_target for progress in seen} == {None}
