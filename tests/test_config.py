"""Configuration: what is read, what is refused, and the error messages.

Also defines `TINY`, the smallest run, which other tests share.
"""

import dataclasses
import functools
import json
import math
from pathlib import Path
from typing import Any

import pytest

from gaugelasso.config import Config, activations, load_config
from gaugelasso.config.target import TargetConfig
from gaugelasso.errors import UserError
from gaugelasso.runs.folder import CONFIG_SECTIONS
from gaugelasso.tasks import Retrieval
from tests.tiny import tiny, write_tiny

CONFIGS = sorted((Path(__file__).parents[1] / "configs").rglob("*.toml"))


def refusal(folder: Path, **changes: Any) -> str:
    """The error message for these changes."""
    with pytest.raises(UserError) as error:
        tiny(folder, **changes)
    return str(error.value)


def from_text(folder: Path, text: str) -> Config:
    path = folder / "config.toml"
    path.write_text(text)
    return load_config(path)


# --- what is read --------------------------------------------------------------------


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: "/".join(path.parts[-2:]))
def test_the_shipped_configs_load(path: Path) -> None:
    config = load_config(path)
    folder = path.parent.name
    assert config.task_name.lower() == ("noise" if folder == "bench" else folder)
    assert config.model.spec(config.task).outputs == config.task.outputs


def test_the_walk_finds_the_shipped_configs() -> None:
    assert {"demo.toml", "main.toml"} <= {path.name for path in CONFIGS}


def test_sections_become_fields_and_the_rest_is_default(tmp_path: Path) -> None:
    config = tiny(tmp_path)
    assert config.task == Retrieval(vocabulary=8, modulus=2, length=6)
    assert (config.model.width, config.model.d_f, config.model.rope) == (8, 8, True)
    assert (config.compress.lr, config.compress.interval) == (0.04, 5)
    assert (config.target.loss, config.target.fma) == (2.0, 0.0)
    assert (config.train.steps, config.train.accumulate) == (40, 1)


def test_a_config_survives_json(tmp_path: Path) -> None:
    config = tiny(tmp_path, compress__penalty="one_sided", model__norm="tied", train__seed=9)
    data = json.loads(json.dumps(config.to_dict()))
    assert data["task"] == {"name": "retrieval", "vocabulary": 8, "modulus": 2, "length": 6}
    assert Config.from_dict(data) == config


def test_the_sections_are_listed_once(tmp_path: Path) -> None:
    """What is read, what is written and what identifies a run folder name the same sections."""
    fields = [field.name for field in dataclasses.fields(Config)]
    fields = [name for name in fields if name not in ("task_name", "task_module")]
    assert fields == list(CONFIG_SECTIONS)
    assert list(tiny(tmp_path).to_dict()) == list(CONFIG_SECTIONS)


def test_whole_numbers_are_valid_for_float_fields(tmp_path: Path) -> None:
    config = tiny(tmp_path, target__loss=1, compress__trust=4)
    assert (config.target.loss, config.compress.trust) == (1.0, 4.0)
    assert isinstance(config.compress.trust, float)


@pytest.mark.parametrize(
    ("text", "value"),
    [("adam", "adam"), ('"adam"', "adam"), ("'adam'", "adam")],
    ids=["bare word", "double quotes", "single quotes"],
)
def test_a_change_is_toml_or_a_bare_word(tmp_path: Path, text: str, value: str) -> None:
    config = load_config(write_tiny(tmp_path), {"compress.optimizer": text})
    assert config.compress.optimizer == value


def test_changes_override_the_file(tmp_path: Path) -> None:
    changes = {"train.steps": "77", "compress.lr": "5e-4", "model.rope": "false"}
    config = load_config(write_tiny(tmp_path), changes)
    assert (config.train.steps, config.compress.lr, config.model.rope) == (77, 5e-4, False)


def test_a_change_may_add_a_section(tmp_path: Path) -> None:
    path = tmp_path / "short.toml"
    path.write_text('[task]\nname = "retrieval"\n')
    assert load_config(path, {"target.loss": "0.5"}).target.loss == 0.5


# --- keys ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("train__stpes", "'steps'"),
        ("train__checkpoint_evry", "'checkpoint_every'"),
        ("model__widht", "'width'"),
        ("compress__sinkhorn", "'sinkhorn_sweeps'"),
        ("target__los", "'loss'"),
        ("task__vocab", "'vocabulary'"),
        ("task__nme", "'name'"),
        ("trian__steps", "'train'"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest(tmp_path: Path, key: str, near: str) -> None:
    message = refusal(tmp_path, **{key: 1})
    assert f"did you mean {near}?" in message
    assert (key.replace("__", ".") if near != "'train'" else "[trian]") in message


def test_without_a_near_name_all_valid_names_are_listed(tmp_path: Path) -> None:
    message = refusal(tmp_path, target__xyzzy=1)
    assert "unknown key target.xyzzy" in message
    assert "valid: above_full, fma, hold, loss, metric, reference" in message
    assert "valid: length, modulus, name, vocabulary" in refusal(tmp_path, task__xyzzy=1)


def test_an_unknown_task_is_refused(tmp_path: Path) -> None:
    message = refusal(tmp_path, task__name="retreival")
    assert "'retreival'" in message
    assert "choose one of: retrieval" in message


def test_a_task_must_be_named(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"task\.name is missing; set it in \[task\] to one of: retrieval"
    ):
        from_text(tmp_path, "[train]\nsteps = 10\n")


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


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere\.toml'.*no such file"):
        load_config(tmp_path / "nowhere.toml")


def test_a_folder_is_not_a_config(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        load_config(tmp_path)


def test_invalid_toml_is_refused_with_the_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.toml'.*not valid TOML.*line 2"):
        from_text(tmp_path, "[task]\nname = \n")


def test_a_binary_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bytes.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"bytes\.toml'.*cannot be read"):
        load_config(path)


@pytest.mark.parametrize("section", CONFIG_SECTIONS)
def test_a_section_must_be_a_table(tmp_path: Path, section: str) -> None:
    head = "" if section == "task" else 'task = { name = "retrieval" }\n'
    with pytest.raises(UserError, match=rf"\[{section}\] must be a section"):
        from_text(tmp_path, f"{head}{section} = 3\n")


@pytest.mark.parametrize("name", ["[1]", "{ a = 1 }", "3"])
def test_a_task_name_is_a_string(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=r"task\.name"):
        from_text(tmp_path, f"[task]\nname = {name}\n")


def test_a_change_needs_its_section(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--set steps=5: name the section too, as in train\."):
        load_config(write_tiny(tmp_path), {"steps": "5"})


def test_a_change_of_a_key_that_is_not_a_section_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "flat.toml"
    path.write_text('train = 3\n[task]\nname = "retrieval"\n')
    with pytest.raises(UserError, match=r"\[train\] must be a section"):
        load_config(path, {"train.steps": "5"})


@pytest.mark.parametrize("data", [[], 3, None, "config"])
def test_json_that_is_not_a_config_is_refused(data: Any) -> None:
    with pytest.raises(UserError):
        Config.from_dict(data)


def test_a_million_layers_are_refused_at_once(tmp_path: Path) -> None:
    assert "model.layers = 1000000" in refusal(tmp_path, model__layers=10**6)


def test_a_structure_too_large_to_be_read_back_is_refused(tmp_path: Path) -> None:
    message = refusal(tmp_path, model__width=100_000, model__layers=20)
    assert "model.layers = 20 with model.width = 100000 make a structure of" in message


# --- what a run names ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "kind", "named"),
    [
        ({}, "loss", 0.05),
        ({"loss": 0.2}, "loss", 0.2),
        ({"loss": 0.2, "fma": 5.0}, "loss", 0.2),
        ({"fma": 5.0}, "fma", None),
        ({"fma": 5.0, "hold": "pressed"}, "loss", 0.05),
        ({"metric": 0.9}, "metric", None),
        ({"loss": 0.2, "metric": 0.9}, "metric", 0.2),
        ({"above_full": 0.5}, "above_full", None),
        ({"above_full": 0.5, "reference": "runs/full"}, "above_full", None),
        ({"above_full": 0.5, "reference_loss": 0.2}, "above_full", 0.3),
    ],
    ids=str,
)
def test_one_key_says_what_is_named(given: dict[str, Any], kind: str, named: float | None) -> None:
    target = TargetConfig(**given)
    assert target.kind == kind
    assert target.named == (None if named is None else pytest.approx(named))
    assert TargetConfig(**dataclasses.asdict(target)) == target


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"above_full": 0.2, "metric": 0.9},
            r"target\.above_full = 0\.2 and target\.metric = 0\.9: ",
        ),
        (
            {"loss": 0.3, "above_full": 0.2, "metric": 0.9},
            r"target\.loss = 0\.3 and target\.above_full = 0\.2 and target\.metric = 0\.9: give "
            r"one of them; only target\.loss and target\.metric go together",
        ),
        (
            {"loss": 0.2, "metric": 0.9, "fma": 5.0},
            r"target\.metric and target\.fma = 5: give one of",
        ),
        (
            {"loss": 0.2, "metric": 0.9, "hold": "pressed"},
            r"remove target\.hold = 'pressed', or remove target\.metric and name the pressed loss",
        ),
        ({"loss": math.inf, "metric": 0.9}, r"target\.loss = inf: must be a finite number"),
        ({"metric": 0.9, "fma": 5.0}, r"target\.metric and target\.fma = 5: give one of them"),
        ({"metric": 0.9, "hold": "pressed"}, r"target\.metric .* remove target\.hold = 'pressed'"),
        ({"above_full": 0.1, "loss": 0.2}, r"target\.loss = 0\.2 and target\.above_full = 0\.1"),
        ({"above_full": 0.1, "fma": 5.0}, r"target\.above_full and target\.fma = 5: give one"),
        ({"above_full": -0.1}, r"target\.above_full = -0\.1: must be 0 or more"),
        ({"reference": "runs/full"}, r"target\.reference = 'runs/full' .* is not given"),
        ({"above_full": 0.1, "reference_loss": -1.0}, r"target\.reference_loss = -1: must be ab"),
        ({"metric": math.nan}, r"target\.metric = nan: must be a finite number"),
    ],
    ids=str,
)
def test_more_than_one_thing_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        TargetConfig(**given)


def test_a_change_on_the_command_line_replaces_what_the_file_names(tmp_path: Path) -> None:
    path = write_tiny(tmp_path)
    final = {"target.hold": "final"}
    target = load_config(path, {**final, "target.metric": "0.9"}).target
    assert (target.loss, target.metric) == (None, 0.9)
    target = load_config(path, {**final, "target.metric": "0.9", "target.loss": "1"}).target
    assert (target.loss, target.metric) == (1.0, 0.9)
    with pytest.raises(UserError, match="give one of them"):
        load_config(path, {**final, "target.metric": "0.9", "target.above_full": "0.1"})


def test_a_change_of_one_replaces_both_that_the_file_names() -> None:
    path = Path(__file__).parents[1] / "configs" / "ff31" / "main.toml"
    target = load_config(path).target
    assert (target.loss, target.metric) == (1e-3, 0.9995)
    target = load_config(path, {"target.loss": "2e-3"}).target
    assert (target.loss, target.metric) == (2e-3, None)
    target = load_config(path, {"target.metric": "0.99"}).target
    assert (target.loss, target.metric) == (None, 0.99)
    target = load_config(path, {"target.loss": "5e-3", "target.hold": "pressed"}).target
    assert (target.loss, target.metric, target.hold) == (5e-3, None, "pressed")
    with pytest.raises(UserError, match=r"target\.metric .* remove target\.hold = 'pressed'"):
        load_config(path, {"target.hold": "pressed"})


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
    fits(10**6, device="cuda")  # whose memory is another one
    with pytest.raises(
        UserError, match=r"train.batch = 11 sequences of 20 positions .* at most 10 sequences"
    ):
        fits(11, device="cpu")
    with pytest.raises(UserError, match=r"--batch 21 .* at most 20 .*: lower it or --length"):
        fits(21, "--batch", "lower it or --length", device="cpu", itemsize=2)
    with pytest.raises(UserError, match=r"more than the limit of 1e\+11"):
        fits(10**9)
