"""Operators that go whole: when, which one, and what keeps them."""

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

from gaugelasso import Compressor, CompressorOptions, Transformer, TransformerSpec
from gaugelasso.axes import named_tensors
from gaugelasso.compress.events import Drop, allowances
from gaugelasso.compress.guard import Guard
from gaugelasso.compress.whole_operators import in_turn
from tests.compress.tables import table_for, written
from tests.distributed.crews import CANONICAL, Crews
from tests.tiny import tiny
from tests.tiny_runs import assert_same_run, finished, killed, rows, start

SPEC = TransformerSpec.uniform(
    width=16, layers=2, heads=2, d_k=8, d_v=8, d_f=24, length=6, inputs=9, outputs=9
)
INTERVAL, DUE = 5, 20


def a_launch(*_: int) -> float:
    """An operation that takes the same time at any size."""
    return 1.0


class Setting:
    """A model of which some operators do little, and the loss of being different from it."""

    def __init__(self, folder: Path, weak: Iterable[str], accounting: str = "latency"):
        torch.manual_seed(0)
        self.model = Transformer(SPEC)
        with torch.no_grad():
            for name, tensor in named_tensors(self.model).items():
                if name.endswith("write.scale") and name.split(".")[1] in weak:
                    tensor.mul_(0.02)
        tokens = torch.arange(24).reshape(4, 6) % 9
        expected = self.model(tokens).detach()
        off: Callable[[], torch.Tensor] = lambda: (self.model(tokens) - expected) / expected.std()  # noqa: E731
        path = written(table_for(self.model, a_launch), folder / "t.json")
        profile = str(path) if accounting == "latency" else None
        options = CompressorOptions(
            accounting=accounting, profile=profile or "", interval=INTERVAL, sinkhorn_sweeps=0
        )
        probe = lambda: 1 + float(off().detach().square().mean())  # noqa: E731
        self.compressor = Compressor(self.model, 1.0, options, probe)
        self.compressor.set_lr_(0)  # nothing is near zero

    def removed(self, step: int = DUE, rho: float = 0.1) -> tuple[str, ...]:
        self.compressor.steps = step
        self.compressor.scalars.rho.fill_(rho)
        event = self.compressor.event_()
        assert event.loss_after is not None
        assert event.loss_after < 1.1
        # An attention takes three launches, an MLP two, and all their channels are counted.
        launches = sum(3 if "attention" in each else 2 for each in event.removed)
        assert event.fma_before - event.fma == launches
        assert {name.rsplit(".", 1)[0] for name in event.dropped} == {*event.removed}
        assert event.prices.keys() == event.dropped.keys()
        return event.removed


def test_the_one_that_costs_least_for_what_it_saves(tmp_path: Path) -> None:
    setting = Setting(tmp_path, ["mlp_1"])
    assert setting.removed() == ("operators.mlp_1",)
    assert "mlp_1" not in setting.model.operators
    assert setting.removed(2 * DUE) == ()  # the others are needed


def test_one_at_a_time(tmp_path: Path) -> None:
    setting = Setting(tmp_path, ["mlp_1", "attention_1"])
    assert setting.removed() == ("operators.mlp_1",)
    assert setting.removed(2 * DUE) == ("operators.attention_1",)


@pytest.mark.parametrize(("step", "rho"), [(DUE + INTERVAL, 0.1), (DUE, 0.0)])
def test_not_at_every_event_and_only_under_pressure(tmp_path: Path, step: int, rho: float) -> None:
    assert Setting(tmp_path, ["mlp_1"]).removed(step, rho) == ()


def test_only_where_an_operator_has_a_cost_of_its_own(tmp_path: Path) -> None:
    compressor = Setting(tmp_path, ["mlp_1"], "fma").compressor
    compressor.steps = DUE
    compressor.scalars.rho.fill_(0.1)
    assert compressor.event_().removed == ()


def test_a_hook_keeps_an_operator_and_hears_only_of_what_would_go(tmp_path: Path) -> None:
    setting = Setting(tmp_path, ["mlp_1", "attention_1"])
    heard = []

    @setting.compressor.on_drop
    def listen(drop: Drop) -> None:
        heard.append(drop.axis)

    assert setting.removed() == ("operators.mlp_1",)
    assert heard
    assert all(axis.startswith("operators.mlp_1.") for axis in heard)

    @setting.compressor.on_drop
    def keep(drop: Drop) -> bool:
        return not drop.axis.startswith("operators.attention_1")

    assert setting.removed(2 * DUE) == ()


def test_not_below_a_work_target(tmp_path: Path) -> None:
    setting = Setting(tmp_path, ["mlp_1", "attention_1"])
    setting.compressor.fma_target = 9.5  # of 12
    assert setting.removed() == ("operators.mlp_1",)
    assert setting.removed(2 * DUE) == ()


def test_what_an_operator_may_cost() -> None:
    """At most a tenth of the loss, the tolerance, and four times what the course allows."""
    assert allowances(2.0, 0.1, None) == pytest.approx((0.2, 0.2))
    assert allowances(2.0, 1e9, None) == pytest.approx((2e9, 0.2))
    assert allowances(2.0, 0.01, None) == pytest.approx((0.02, 0.02))
    assert allowances(-100.0, 0.1, 0.02) == pytest.approx((0.02, 0.08))


def test_a_removal_that_costs_too_much_after_all_is_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = Setting(tmp_path, [])
    loss = Guard.loss_without
    monkeypatch.setattr(Guard, "loss_without", lambda *given: min(1.0, loss(*given)))
    compressor = setting.compressor
    widths = compressor.widths
    compressor.steps = DUE
    compressor.scalars.rho.fill_(0.1)
    event = compressor.event_()
    assert event.removed == ()
    assert event.undone["operator"] > 1.1
    assert compressor.widths == widths
    assert compressor.probe is not None
    assert compressor.probe() == event.loss_after == event.loss_balanced


def test_few_are_tried_at_a_time() -> None:
    names = ["a", "b", "c", "d", "e"]
    assert [in_turn(names, turn, 2) for turn in range(4)] == [
        ["a", "b"],
        ["c", "d"],
        ["e", "a"],
        ["b", "c"],
    ]
    assert in_turn(names, 3, 5) == names
    assert in_turn([], 3, 5) == []


def changes_of(folder: Path) -> dict[str, str]:
    config = tiny(folder)
    path = written(table_for(config.model.build(config.task, 3), a_launch), folder / "t.json")
    return {"compress__accounting": "latency", "compress__profile": str(path)}


def test_a_run_loses_operators_and_goes_on_exactly(tmp_path: Path) -> None:
    """With nothing but launches to save, a run is cut by operators, and a killed one the same."""
    changes = changes_of(tmp_path)
    whole = finished(tmp_path, "whole", **changes)
    removed = [event["step"] for event in rows(whole, "events.jsonl") if event["removed"]]
    assert removed
    killed(tmp_path, removed[0] + 1, "killed", **changes)
    start(tmp_path, "killed", "resume", **changes).run()
    assert_same_run(whole, tmp_path / "killed")


def test_ranks_lose_the_same_operators(tmp_path: Path) -> None:
    profile = changes_of(tmp_path)["compress__profile"]
    settings = (
        *CANONICAL, 'compress.accounting="latency"', f'compress.profile="{profile}"',
        "train.steps=30", "train.warmup=0", "compress.interval=2", "compress.trust=0.1",
        "compress.drop_tolerance=0.1", "target.loss=1.9",
    )  # fmt: skip
    (tmp_path / "crews").mkdir()
    crews = Crews(tmp_path / "crews", settings)
    one, two = (crews.finish(str(ranks), ranks) for ranks in (1, 2))
    assert any(event["removed"] for event in rows(one, "events.jsonl"))
    assert_same_run(one, two)
