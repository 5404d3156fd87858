"""Golden curves: fifty steps with compression on, kept beside the code.

A change of the method shows here first. Where it is meant, write the files anew with

    python -m tests.test_golden

and say in the commit why they moved. In float64 from rounded weights: pressure, signs and
drops enlarge a difference in the last bit ten-thousandfold, and no two CPUs agree on it.
"""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gaugelasso.axes import named_tensors
from gaugelasso.compress.compressor import Compressor, CompressorOptions
from gaugelasso.models import Transformer, TransformerSpec
from gaugelasso.tasks import Draw, Retrieval
from gaugelasso.training.schedule import Schedule

FOLDER = Path(__file__).parent / "golden"
SEED, BATCH, TARGET = 42, 8, 2.4
TASK = Retrieval(vocabulary=16, modulus=3, length=12)
SCHEDULE = Schedule(steps=50, warmup=3, cooldown=8, saturation=0, lr=0.03, lr_min=0.003)
CURVES: dict[str, dict[str, Any]] = {
    "muon": {"trust": 2.0},
    "adam": {"optimizer": "adam", "accounting": "paper"},
}


def curve(**options: Any) -> dict[str, Any]:
    """Losses and sizes of every step, every drop, and the structure that is left."""
    spec = TransformerSpec.uniform(
        width=12,
        layers=2,
        heads=2,
        kv_heads=1,
        d_k=6,
        d_v=5,
        d_f=16,
        positions=True,
        length=TASK.length,
        inputs=TASK.inputs,
        outputs=TASK.outputs,
    )
    model = Transformer(spec, SEED).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((parameter * 1024).round() / 1024)
    now: dict[str, torch.Tensor] = {}

    def loss_now() -> torch.Tensor:
        # Not the task's own loss, which is taken in float32.
        return F.cross_entropy(model(now["inputs"]).flatten(0, 1), now["targets"].flatten())

    settings = CompressorOptions(**{"lr": SCHEDULE.lr, "interval": 5, "trust": 6.0, **options})
    compressor = Compressor(model, TARGET, settings, probe=lambda: loss_now().item())
    losses, sizes = [], []
    for step in range(SCHEDULE.steps):
        compressor.set_pressure_(SCHEDULE.phase(step, None) == "compression")
        compressor.set_lr_(SCHEDULE.rate(step, None))
        now["inputs"], now["targets"] = TASK.batch(BATCH, Draw(SEED, step), "cpu")
        loss = loss_now()
        loss.backward()
        compressor.step(loss)
        losses.append(loss.item())
        sizes.append(compressor.fma)
    events = [
        {"step": e.step, "dropped": e.dropped, "removed": list(e.removed), "refused": e.refused}
        for e in compressor.history
    ]
    norm = sum(t.detach().double().square().sum().item() for t in named_tensors(model).values())
    return {
        "losses": losses,
        "fma": sizes,
        "events": events,
        "square_norm": norm,
        "structure": json.loads(json.dumps(compressor.structure)),
    }


@pytest.mark.parametrize("name", CURVES)
def test_the_curve_is_the_one_on_record(name: str) -> None:
    golden, now = json.loads((FOLDER / f"{name}.json").read_text()), curve(**CURVES[name])
    assert now["losses"] == pytest.approx(golden["losses"], rel=1e-3)
    assert now["events"] == golden["events"]
    assert now["fma"] == golden["fma"]
    assert now["structure"] == golden["structure"]
    assert now["square_norm"] == pytest.approx(golden["square_norm"], rel=1e-3)


@pytest.mark.parametrize("name", CURVES)
def test_the_record_is_worth_comparing_with(name: str) -> None:
    """It learns, shrinks more than once on most axes, not to nothing, and cooldown leaves it so."""
    golden = json.loads((FOLDER / f"{name}.json").read_text())
    assert len(golden["losses"]) == SCHEDULE.steps
    assert min(golden["losses"]) < golden["losses"][0] - 0.3
    assert sum(before > after for before, after in pairwise(golden["fma"])) >= 2
    assert golden["fma"][-1] < 0.8 * golden["fma"][0]
    kinds = {axis.split(".")[-1] for event in golden["events"] for axis in event["dropped"]}
    assert len(kinds) >= 5
    assert {row["kind"] for row in golden["structure"]["operators"]} == {"attention", "mlp"}
    assert len(set(golden["fma"][-SCHEDULE.cooldown - 1 :])) == 1


def write_all() -> None:
    torch.set_num_threads(1)
    for name, options in CURVES.items():
        (FOLDER / f"{name}.json").write_text(json.dumps(curve(**options), indent=1) + "\n")


if __name__ == "__main__":
    write_all()
