"""Configuration: values that are refused, and batches that cannot fit."""

import functools
from pathlib import Path
from typing import Any

import pytest

from gaugelasso.config import activations, load_config
from gaugelasso.errors import UserError
from tests.refusals import refusal
from tests.tiny import tiny, write_tiny

# --- values --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("train__steps", "x", "a whole number"),
        ("train__steps", 1.5, "a whole number"),
        ("train__steps", True, "a whole number"),
        ("train__steps", [1], "a whole number"),
        ("compress__lr", "fast", "a number"),
        ("compress__lr", True, "a number"),
        ("model__rope", 1, "true or false"),
        ("train__device", 3, "a string"),
    ],
)
def test_a_wrong_type_is_named(tmp_path: Path, key: str, value: Any, expected: str) -> None:
    message = refusal(tmp_path, **{key: value})
    assert message == f"{key.replace('__', '.')} = {value!r}: must be {expected}"


@pytest.mark.parametrize(
    ("key", "choices"),
    [
        ("model__norm", "slow, tied"),
        ("compress__solver", "conservative, sign_step, fixed"),
        ("compress__penalty", "symmetric, one_sided, product_norm"),
        ("compress__optimizer", "muon, adam"),
        ("compress__accounting", "fma, paper, bytes, latency"),
        ("train__precision", "auto, float32, bfloat16"),
    ],
)
def test_choices_are_listed(tmp_path: Path, key: str, choices: str) -> None:
    message = refusal(tmp_path, **{key: "none of these"})
    assert message == f"{key.replace('__', '.')} = 'none of these'; choose one of: {choices}"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((f"model__{name}", -1) for name in ("width", "layers", "heads", "d_k", "d_v", "d_f")),
        ("model__width", 0),
        ("model__width", 10**7),
        ("model__d_f", 10**12),
        ("model__kv_heads", 3),
        ("model__rope_base", 0),
        ("model__rope_base", -2.0),
        ("task__vocabulary", 0),
        ("task__vocabulary", -5),
        ("task__modulus", 0),
        ("task__modulus", 9),
        ("task__length", 0),
        ("train__steps", 0),
        ("train__steps", -1),
        ("train__batch", 0),
        ("train__accumulate", 0),
        ("train__log_every", 0),
        ("train__eval_batches", 0),
        ("train__checkpoint_every", 0),
        ("train__seed", -1),
        ("train__warmup", -1),
        ("train__cooldown", -1),
        ("train__saturation", -1),
        ("train__threads", -1),
        ("train__threads", 10**12),
        ("train__lr_min", -1.0),
        ("target__fma", -1.0),
        ("compress__lr", 0),
        ("compress__lr", -1e-3),
        ("compress__trust", 0),
        ("compress__interval", 0),
        ("compress__sinkhorn_sweeps", -1),
        ("compress__beta", 1.0),
    ],
)
def test_a_number_out_of_range_is_refused_by_name(tmp_path: Path, key: str, value: Any) -> None:
    message = refusal(tmp_path, **{key: value})
    assert key.replace("__", ".") in message
    assert str(value) in message


@pytest.mark.parametrize(
    "key", ["compress.lr", "compress.trust", "target.loss", "target.fma", "train.lr_min"]
)
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_number_must_be_finite(tmp_path: Path, key: str, value: str) -> None:
    with pytest.raises(UserError, match=key):
        load_config(write_tiny(tmp_path), {key: value})


def test_phases_must_fit_into_the_run(tmp_path: Path) -> None:
    message = refusal(tmp_path, train__warmup=30, train__cooldown=11)
    assert "warmup = 30" in message
    assert "cooldown = 11" in message
    assert "steps = 40" in message
    assert tiny(tmp_path, train__warmup=30, train__cooldown=10).train.steps == 40


def test_widths_that_cannot_be_built_are_refused(tmp_path: Path) -> None:
    assert "d_k = 3 is odd" in refusal(tmp_path, model__d_k=3)
    assert tiny(tmp_path, model__d_k=3, model__rope=False).model.d_k == 3
    message = refusal(tmp_path, model__heads=3, model__kv_heads=2)
    assert "heads = 3 is not a multiple of kv_heads = 2" in message


@pytest.mark.parametrize(
    "changes",
    [
        {"model__width": 10**6, "model__d_f": 10**6},
        {"model__heads": 10**6, "model__d_k": 10**6},
        {"task__vocabulary": 10**12},
        {"task__length": 10**12},
        {"train__batch": 10**9, "task__length": 10**6},
    ],
    ids=str,
)
def test_a_model_too_large_for_any_machine_is_refused(
    tmp_path: Path, changes: dict[str, int]
) -> None:
    """Each number may be valid on its own; together they would take terabytes."""
    refusal(tmp_path, **changes)


# --- files ---------------------------------------------------------------------------


def test_a_million_layers_are_refused_at_once(tmp_path: Path) -> None:
    assert "model.layers = 1000000" in refusal(tmp_path, model__layers=10**6)


def test_a_structure_too_large_to_be_read_back_is_refused(tmp_path: Path) -> None:
    message = refusal(tmp_path, model__width=100_000, model__layers=20)
    assert "model.layers = 20 with model.width = 100000 make a structure of" in message


# --- what a run names ----------------------------------------------------------------


def test_a_cache_is_not_longer_than_the_model(tmp_path: Path) -> None:
    message = "compress.serving_length = 7: the model's sequences have 6 tokens at most"
    assert message in refusal(tmp_path, compress__serving_length=7)
    assert tiny(tmp_path, compress__serving_length=6).compress.serving_length == 6


def test_batches_that_cannot_fit_are_refused_with_what_could(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(activations, "memory_bytes", lambda: 8_000)
    fits = functools.partial(activations.check_activations, 10, 20)  # 800 bytes of a sequence
    fits(10, device="cpu")
    fits(20, device="cpu", itemsize=2)
    monkeypatch.setattr(activations, "free_bytes", lambda device: 16_000)  # that of a GPU
    fits(20, device="cuda")
    with pytest.raises(UserError, match=r"1.6e-05 GB that are free on the GPU .* most 20 seq"):
        fits(21, device="cuda:0")
    with pytest.raises(
        UserError, match=r"train.batch = 11 sequences of 20 positions .* at most 10 sequences"
    ):
        fits(11, device="cpu")
    with pytest.raises(UserError, match=r"--batch 21 .* at most 20 .*: lower it or --length"):
        fits(21, "--batch", "lower it or --length", device="cpu", itemsize=2)
    with pytest.raises(UserError, match=r"more than the limit of 1e\+11"):
        fits(10**9)
