"""Any number of ranks trains the same model: to the last bit in canonical order."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gaugelasso import Compressor, CompressorOptions, Transformer
from gaugelasso.distributed import join
from gaugelasso.tasks import Draw
from tests.distributed.crews import CANONICAL, SETTINGS, STEPS, Crew, Crews, Fault, become
from tests.tiny import TIED, tiny
from tests.tiny_runs import assert_same_run, final_tensors, newest, outcome, read, rows

# Rounding noise grows slowly here: a low rate, no Newton-Schulz, and trust that still drops.
GENTLE = (*SETTINGS, "compress.lr=0.01", "compress.trust=16", 'compress.optimizer="adam"')
GENTLE += ("train.steps=20", "train.cooldown=5", "train.checkpoint_every=20")


def test_canonical_order_gives_the_same_bits(crews: Crews) -> None:
    """Losses of all steps, events with their probes, final weights and optimizer state.

    The same run on two ranks is that of `test_asked_to_stop_at_the_end_ranks_come_to_it`.
    """
    events = rows(crews.home / "one", "events.jsonl")
    assert sum(bool(event["dropped"]) for event in events) > 2
    assert any(event["spared"] for event in events)
    assert any(event["removed"] for event in events)
    run = crews.finish("canonical", 4)
    assert_same_run(crews.home / "one", run)
    # Rank 0 writes, and speaks for all.
    assert "run folder" in crews.log(run.name)
    assert crews.log(run.name, 1) == ""
    assert read(run / "environment.json")["ranks"] == 4
    assert not (run / "run.lock").exists()


def test_ranks_undo_alike(tmp_path: Path) -> None:
    """Sites are split that should not be."""
    split = ("compress.split_share=0.5", "compress.drop_tolerance=0.003")
    crews = Crews(tmp_path, (*CANONICAL, "train.steps=10", *split))
    one, two = crews.finish("1", 1), crews.finish("2", 2)
    assert any(event["undone"] for event in rows(one, "events.jsonl"))
    assert_same_run(one, two)


def test_ranks_stop_alike_at_a_work_target(tmp_path: Path) -> None:
    crews = Crews(tmp_path, (*CANONICAL, "target.fma=450"))
    one, two = crews.finish("1", 1), crews.finish("2", 2)
    assert any(event["withheld"] for event in rows(one, "events.jsonl"))
    assert outcome(one)["fma_final"] <= 450
    assert_same_run(one, two)


def test_ranks_exchange_alike(tmp_path: Path) -> None:
    settings = ("compress.exchange=6", "compress.trust=0.5", "train.steps=12")
    crews = Crews(tmp_path, (*CANONICAL, *settings))
    one, two = crews.finish("1", 1), crews.finish("2", 2)
    assert any(event.get("grown") for event in rows(one, "events.jsonl"))
    assert_same_run(one, two)


def test_any_order_gives_the_same_structure(tmp_path: Path) -> None:
    crews = Crews(tmp_path, GENTLE)
    one, run = crews.finish("1", 1), crews.finish("4", 4)
    assert outcome(one)["fma_final"] < outcome(one)["fma_initial"]
    assert outcome(run)["structure"] == outcome(one)["structure"]
    for mine, theirs in zip(rows(one, "events.jsonl"), rows(run, "events.jsonl"), strict=True):
        assert mine["widths"] == theirs["widths"]
    losses, others = ([row["loss"] for row in rows(f, "metrics.jsonl")] for f in (one, run))
    assert others == pytest.approx(losses, rel=1e-5)


def test_saved_on_four_resumed_on_two_one_and_four(crews: Crews) -> None:
    """Each leg is stopped by SIGTERM to one of its ranks, which all hear of."""
    for number, (size, step) in enumerate([(4, 4), (2, 9), (1, 12)]):
        options = ["--resume"] if number else []
        fault = Fault("SIGTERM", size - 1, step)
        assert crews.run("relay", size, *options, fault=fault) == [143] * size, crews.logs("relay")
        # The wish goes out with the step after the signal, but on one rank at once.
        assert read(newest(crews.home / "relay") / "state.json")["steps"] >= step + 1
    assert crews.run("relay", 4, "--resume") == [0] * 4, crews.logs("relay")
    assert_same_run(crews.home / "one", crews.home / "relay")
    seams = rows(crews.home / "relay", "resumed.jsonl")
    assert [row["ranks"] for row in seams] == [2, 1, 4]  # written by one of them


def test_tied_norms_are_the_same_too(tmp_path: Path) -> None:
    """Their energies stay what they were: nobody follows them."""
    crews = Crews(tmp_path, (*CANONICAL, 'model.norm="tied"', "train.steps=13"))
    assert_same_run(crews.finish("1", 1), crews.finish("2", 2))
    assert rows(tmp_path / "2", "events.jsonl")


def test_a_tied_head_is_the_same_too(tmp_path: Path) -> None:
    crews = Crews(tmp_path, CANONICAL, TIED)
    one, two = crews.finish("1", 1), crews.finish("2", 2)
    assert_same_run(one, two)
    assert outcome(one)["fma_final"] < outcome(one)["fma_initial"]
    assert not any("classifier.out" in name for name in final_tensors(two))


@pytest.mark.parametrize("rank", [0, 1])
def test_asked_to_stop_at_the_end_ranks_come_to_it(crews: Crews, rank: int) -> None:
    """What is left is to sum up: none leaves while others wait for it."""
    name = f"end-{rank}"
    assert crews.run(name, 2, fault=Fault("SIGTERM", rank, STEPS)) == [0, 0], crews.logs(name)
    assert_same_run(crews.home / "one", crews.home / name)


def own_loop(rank: int, size: int, port: int, out: Path) -> None:
    """The loop of docs/how-to/several-devices.md: each rank has its share of 8 sequences a step."""
    become(rank, size, port)
    team, config = join(gpu=False, timeout_s=10), tiny(out / str(rank))
    model = Transformer(config.model.spec(config.task), 3)
    options = CompressorOptions(lr=0.01, trust=8, interval=5, optimizer="adam")
    compressor = Compressor(model, 3.0, options, team=team)
    for step in range(20):
        inputs, targets = config.task.batch(8, Draw(0, step), "cpu")
        mine = slice(rank * 8 // size, (rank + 1) * 8 // size)
        loss = config.task.loss(model(inputs[mine]), targets[mine])
        loss.backward()
        compressor.step(loss)
    team.close()
    save_file(model.state_dict(), out / str(rank) / "model.safetensors")


def test_your_own_loop(tmp_path: Path) -> None:
    outs = []
    for size in (1, 2):
        for rank in range(size):
            (tmp_path / str(size) / str(rank)).mkdir(parents=True)
        assert Crew.of(size, own_loop, tmp_path / str(size)).wait() == [0] * size
        outs += [load_file(path) for path in sorted((tmp_path / str(size)).glob("*/*.safe*"))]
    one, first, second = outs
    for name, tensor in one.items():
        assert torch.equal(first[name], second[name])
        assert torch.allclose(first[name], tensor, atol=1e-4), name


def test_micro_batches_that_cannot_be_shared_out_are_refused(tmp_path: Path) -> None:
    crews = Crews(tmp_path, (*CANONICAL, "train.accumulate=3"))
    assert crews.run("odd", 2) == [2, 2]
    assert "train.accumulate = 3" in crews.log("odd")
    assert "make it a multiple of 2" in crews.log("odd")
    assert "Traceback" not in crews.logs("odd")
    assert not (tmp_path / "odd").exists()
