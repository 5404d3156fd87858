"""Keys that a config need not have where `target.loss` is that of the final model."""

import json
from pathlib import Path
from typing import Any

import pytest

from gaugelasso.compress.options import RunOptions
from gaugelasso.config import Config, run_config
from gaugelasso.config.auto import course_defaults
from gaugelasso.config.sections import TrainConfig
from gaugelasso.errors import UserError
from tests.tiny import tiny

MODEL = {"width": 32, "layers": 1, "heads": 2, "d_k": 8, "d_v": 8, "d_f": 32}


def config(hold: str | None = None, **sections: Any) -> Config:
    target = {} if hold is None else {"hold": hold}
    given = {"task": {"name": "retrieval"}, "model": MODEL, "target": target}
    return Config.from_dict(given | sections)


def test_the_loss_is_that_of_the_final_model_unless_said_otherwise() -> None:
    assert config().target.hold == "final"
    assert config("pressed").target.hold == "pressed"
    with pytest.raises(UserError, match=r"target\.hold = 'sometimes'"):
        config("sometimes")


def test_missing_keys_follow_from_model_and_steps() -> None:
    filled = config(train={"steps": 2_000})
    assert (filled.train.warmup, filled.train.cooldown) == (100, 760)
    assert filled.compress.interval == 20
    assert filled.train.lr_min == pytest.approx(0.05 * filled.compress.lr)
    assert filled.train.log_every == 40
    assert config().train.log_every == TrainConfig.log_every
    wide = config(model=MODEL | {"width": 256, "d_k": 64, "d_v": 64, "d_f": 256})
    assert 1e-4 <= wide.compress.lr < filled.compress.lr <= 3e-3


def test_given_keys_stay() -> None:
    train = {"steps": 2_000, "warmup": 7, "cooldown": 9, "lr_min": 0.5, "log_every": 3}
    given = config(train=train, compress={"lr": 0.01, "interval": 4})
    assert (given.compress.lr, given.compress.interval) == (0.01, 4)
    for key, value in train.items():
        assert getattr(given.train, key) == value


def test_each_missing_key_is_filled_on_its_own() -> None:
    only_lr = config(train={"steps": 2_000}, compress={"lr": 0.01})
    assert only_lr.train.lr_min == pytest.approx(0.0005)
    assert (only_lr.train.warmup, only_lr.compress.interval) == (100, 20)
    only_warmup = config(train={"steps": 2_000, "warmup": 7})
    assert (only_warmup.train.warmup, only_warmup.train.cooldown) == (7, 760)


def test_a_pressed_run_keeps_the_plain_defaults() -> None:
    pressed = config("pressed")
    assert pressed.train == TrainConfig()
    assert pressed.compress == RunOptions()


@pytest.mark.parametrize("steps", [1, 19])
def test_too_few_steps_are_refused(steps: int) -> None:
    said = rf"train\.steps = {steps}: a final loss needs at least 20 steps; raise it, or set target"
    with pytest.raises(UserError, match=said):
        config(train={"steps": steps})
    assert (
        config("pressed", train={"steps": steps, "warmup": 0, "cooldown": 0}).train.steps == steps
    )
    assert config(train={"steps": 20}).train.steps == 20


@pytest.mark.parametrize(
    ("section", "table", "said"),
    [
        ("train", {"steps": "many"}, r"train\.steps"),
        ("train", {"steps": 99.5}, r"train\.steps"),
        ("compress", {"lr": "fast"}, r"compress\.lr"),
        ("compress", {"lr": -1.0}, r"compress\.lr"),
        ("train", 7, r"\[train\]"),
        ("compress", [], r"\[compress\]"),
        ("train", {"stepz": 7}, r"train\.stepz"),
        ("train", {"steps": 100, "cooldown": 98}, r"train\.cooldown = 98 do not fit"),
    ],
    ids=lambda value: str(value),
)
def test_wrong_values_are_named_as_before(section: str, table: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        config(**{section: table})


def test_a_resolved_config_reads_as_itself() -> None:
    first = config(train={"steps": 500})
    again = Config.from_dict(json.loads(json.dumps(first.to_dict())))
    assert again == first


def test_a_run_folder_without_the_key_is_of_a_pressed_run(tmp_path: Path) -> None:
    """It is of a version that knew no other meaning."""
    data = tiny(tmp_path).to_dict()
    assert data["target"].pop("hold") == "pressed"
    (tmp_path / "config.json").write_text(json.dumps(data))
    read = run_config(tmp_path)
    assert read.target.hold == "pressed"
    assert read == tiny(tmp_path)


def test_a_run_folder_with_the_key_keeps_it(tmp_path: Path) -> None:
    final = tiny(tmp_path, target__hold="final", train__steps=50)
    (tmp_path / "config.json").write_text(json.dumps(final.to_dict()))
    assert run_config(tmp_path) == final
    assert run_config(tmp_path, {"target.hold": "pressed"}).target.hold == "pressed"


def test_tables_are_not_changed() -> None:
    tables: dict[str, Any] = {"compress": {}, "train": {"steps": 100}}
    filled = course_defaults(tables, lambda: [64 * 64])
    assert tables == {"compress": {}, "train": {"steps": 100}}
    assert filled["compress"] == {"lr": 0.2 / 64, "interval": 10} | {"lr": 3e-3}
