"""The small configs at work: each learns, and shrinks, before a coffee is made.

Shorter than a user would run them, and so at a target that is sooner reached; with a smaller model
and smaller batches.
"""

from pathlib import Path

import pytest

from gaugelasso.config import load_config
from gaugelasso.training.trainer import Trainer

ROOT = Path(__file__).parents[2]
# By task: steps, a target that leaves most of them to compression, and the loss on held-out data.
SHORT = {"charlm": (75, 3.2, 3.3), "ff31": (90, 0.6, 0.6), "mae": (60, 0.9, 0.9)}
SOONER = {"compress.interval": 5, "compress.trust": 1.5}
SMALLER = {
    "charlm": {"model.layers": 1, "task.length": 32, "train.batch": 8, "compress.lr": 0.012}
    | SOONER
    | {"compress.trust": 4},
    "ff31": {"model.heads": 2, "model.d_k": 8, "train.batch": 8} | SOONER | {"compress.trust": 6},
    "mae": {"model.layers": 1, "train.batch": 4, "compress.lr": 0.015}
    | SOONER
    | {"compress.trust": 4},
}


@pytest.mark.parametrize("name", SHORT)
def test_a_small_config_reaches_its_target_and_shrinks(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)  # the path of charlm's corpus is relative to it
    monkeypatch.setenv("GAUGELASSO_CACHE", str(tmp_path / "cache"))
    steps, target, held_out = SHORT[name]
    changes = {
        "target.loss": target, "target.hold": "pressed", "train.steps": steps,
        "train.warmup": steps // 15, "compress.lr": 6e-3, "compress.interval": 10,
        "train.cooldown": steps // 5, "train.eval_every": steps, "train.final_batches": 4,
        "train.device": "cpu", **SMALLER[name],
    }  # fmt: skip
    config = load_config(
        ROOT / "configs" / name / "small.toml", {key: str(value) for key, value in changes.items()}
    )
    summary = Trainer(config, tmp_path / "run").run()
    assert summary["target_reached_step"] is not None
    assert summary["fma_final"] < 0.75 * summary["fma_initial"]
    # Held-out data has no promise; but what was learned holds there too.
    assert summary["loss"] < held_out
