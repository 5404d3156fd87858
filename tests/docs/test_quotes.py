"""What pages quote from the code is as it is: keys, defaults, options, errors and programs."""

import ast
import dataclasses
import hashlib
import importlib.util
import json
import re
import shlex
import tomllib
import types
import typing
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from gaugelasso import axes
from gaugelasso.config import Config, load_config
from gaugelasso.plugins import NamedBy
from gaugelasso.tasks import TASKS
from tests.docs.pages import (
    ALL_BLOCKS,
    COMMAND_LINE,
    COMMANDS,
    CONFIGURATION,
    CONTROLS,
    OWN_MODEL,
    PAGES,
    PYTHON,
    ROOT,
    SECTIONS,
    Block,
    blocks,
    commands,
    page_id,
    read,
    rows,
    under,
    write_task,
)
from tests.importing.bases import write_base, write_encoder

FROZEN = "0d512436b8db9da9211e154cec39952f93d0bbd3909863a5b565cfdbbba19075"
KEYED = {f"## `[{name}]`": cls for name, cls in SECTIONS.items()}
KEYED |= {f"### `{name}`": cls for name, cls in TASKS.items()}


def toml(value: Any) -> str:
    return json.dumps(value)


@pytest.mark.parametrize("heading", KEYED)
def test_every_key_is_described_with_its_default(heading: str) -> None:
    cls = KEYED[heading]
    hints = typing.get_type_hints(cls)
    described = {row[0].strip("`"): row for row in rows(under(heading, CONFIGURATION))}
    fields = {field.name: field for field in dataclasses.fields(cls)}
    assert described.keys() == fields.keys()
    said = {int: "whole number", float: "number", bool: "true or false", str: "string"}
    for name, field in fields.items():
        _, kind, default, meaning, valid = described[name]
        assert meaning, name
        assert default == ("none" if field.default is None else f"`{toml(field.default)}`"), name
        optional = isinstance(hints[name], types.UnionType)  # None: the key is not given
        hint = typing.get_args(hints[name])[0] if optional else hints[name]
        if typing.get_origin(hints[name]) is Literal:
            assert valid == ", ".join(f"`{choice}`" for choice in typing.get_args(hints[name]))
        else:
            assert kind == said[hint], name


def test_automatic_values_are_those_of_the_example() -> None:
    example_config = next(block.text for block in blocks(CONFIGURATION) if block.kind == "toml")
    resolved = Config.from_dict(tomllib.loads(example_config)).to_dict()
    described = rows(under("### Automatic values", CONFIGURATION))
    assert len(described) == 8
    for key, _, value in described:
        section, _, name = key.strip("`").partition(".")
        assert tomllib.loads(f"value = {value.strip('`')}")["value"] == pytest.approx(
            resolved[section][name]
        ), key


def test_the_full_model_is_trained_as_the_compressed_run_is() -> None:
    """Rivals take rates and phases from it, and are compared with that run."""
    (line,) = (line for line in commands("gaugelasso", [CONTROLS]) if "compress.rho=0" in line)
    _, name, *arguments = shlex.split(line)
    given = COMMANDS[name].make_context(name, arguments).params
    changes = dict(change.split("=", 1) for change in given["set_"])
    full, demo = (load_config(ROOT / given["config"], each).to_dict() for each in (changes, {}))
    assert {
        f"{section}.{key}"
        for section, values in demo.items()
        for key, value in values.items()
        if full[section][key] != pytest.approx(value)
    } == {"compress.solver", "target.loss", "target.hold"}


def test_every_task_is_described() -> None:
    name, module = rows(under("## `[task]`", CONFIGURATION))
    assert module[0] == "`module`"
    assert name[-1] == ", ".join(f"`{task}`" for task in TASKS)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_keys_named_in_prose_exist(page: Path) -> None:
    for section, key in re.findall(r"`(model|target|compress|train)\.(\w+)", read(page)):
        names = {field.name for field in dataclasses.fields(SECTIONS[section])}
        names |= {"module", "name", "from", "context", "sha256"} if section == "model" else set()
        # `model` is also what programs call a model.
        # And the name of a package is also that of a section.
        package = section == "compress"
        module = package and importlib.util.find_spec(f"gaugelasso.{section}.{key}")
        if section == "model" and key in {
            *dir(torch.nn.Module),
            "safetensors",
            "onnx",
            "pt2",
            "spec",
        }:
            continue
        assert module or key in names, f"{section}.{key}"


@pytest.mark.parametrize("block", [b for b in ALL_BLOCKS if b.kind == "toml"], ids=str)
def test_configs_on_pages_are_valid(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tomllib.loads(block.text)
    if base := data.get("model", {}).get("from"):
        monkeypatch.chdir(tmp_path)
        write = write_encoder if data["task"]["name"] == "masked_tokens" else write_base
        write(tmp_path / "made", context=data["task"]["length"]).rename(_parent(base))
    if "module" in data["task"]:
        write_task(block.page, tmp_path / data["task"]["module"].partition(":")[0])
    config = Config.from_dict(data, NamedBy(tmp_path))
    assert config.to_dict()["train"]["steps"] == data["train"]["steps"]


def _parent(path: str) -> Path:
    """The path, with the folders that lead to it."""
    Path(path).parent.mkdir(parents=True)
    return Path(path)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_of_a_command_is_described(name: str) -> None:
    cells = [row[0] for row in rows(under(f"## {name}", COMMAND_LINE))]
    described = re.findall(r"`(--[\w-]+)", " ".join(cells))
    options = {opt for param in COMMANDS[name].params for opt in param.opts if opt[:2] == "--"}
    assert sorted(described) == sorted(options - {"--help"})


# --- blocks and errors ---------------------------------------------------------------


def test_every_block_says_what_it_is() -> None:
    # A block without a language, or one that is indented, is one that no test looks at.
    for page in PAGES:
        assert len(blocks(page)) == len(re.findall(r"^ *```", read(page), re.M)) / 2, page.name


def error_templates() -> list[str]:
    """What the axes package can raise, with … for the parts that vary."""
    templates = []
    files = sorted(Path(axes.__file__).parent.glob("*.py"))
    for node in (node for file in files for node in ast.walk(ast.parse(read(file)))):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            if not node.exc.args:
                continue
            message = node.exc.args[0]
            parts = message.values if isinstance(message, ast.JoinedStr) else [message]
            templates.append(
                "".join(str(p.value) if isinstance(p, ast.Constant) else "…" for p in parts)
            )
    return templates


def test_errors_are_explained() -> None:
    explained = [
        row[0].strip("`").replace("'", "") for row in rows(under("## What errors mean", OWN_MODEL))
    ]
    patterns = [re.compile(".*".join(map(re.escape, text.split("…")))) for text in explained]
    templates = error_templates()
    assert len(templates) > 10
    for template in templates:
        assert any(p.search(template) for p in patterns), f"not explained: {template}"
    for text, pattern in zip(explained, patterns, strict=True):
        assert any(map(pattern.search, templates)), f"no longer raised: {text}"


def test_the_corpus_of_the_small_text_config_is_frozen() -> None:
    # The figures of configs/charlm/small.toml depend on every byte of it.
    folder = ROOT / load_config(ROOT / "configs/charlm/small.toml").to_dict()["task"]["path"]
    joined = b"".join(path.read_bytes() for path in sorted(folder.iterdir()))
    assert hashlib.sha256(joined).hexdigest() == FROZEN


QUOTES = [block for block in PYTHON if (block.mark or "").startswith("from ")]


@pytest.mark.parametrize("block", QUOTES, ids=str)
def test_quotes_are_verbatim(block: Block) -> None:
    assert block.text in read(ROOT / str(block.mark).removeprefix("from "))


def test_marks_are_known() -> None:
    for block in ALL_BLOCKS:
        mark = block.mark or "runnable"
        assert mark == "runnable" or mark.startswith("from examples/"), mark
