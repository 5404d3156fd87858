"""Configuration: what is read, which keys and files are refused, and what a run names."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from gaugelasso.config import Config, load_config
from gaugelasso.config.target import TargetConfig
from gaugelasso.errors import UserError
from gaugelasso.runs.folder import CONFIG_SECTIONS
from gaugelasso.tasks import Retrieval
from tests.refusals import refusal
from tests.tiny import tiny, write_tiny

CONFIGS = sorted((Path(__file__).parents[1] / "configs").rglob("*.toml"))


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
