"""The pages say what the code does: keys, names, links, commands and programs in them."""

import ast
import dataclasses
import importlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import tomllib
import types
import typing
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import typer

from gaugelasso import axes, load_model
from gaugelasso.cli import app
from gaugelasso.compress import reference
from gaugelasso.config import Config, load_config
from gaugelasso.sweeps.arms import parse_arms
from gaugelasso.tasks import TASKS, Draw

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = [README, *sorted(DOCS.glob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SECTIONS: dict[str, Any] = {
    name: cls for name, cls in typing.get_type_hints(Config).items() if "task" not in name
}
_BLOCK = re.compile(
    r"(?:<!-- (?P<mark>[^>]+) -->\n)?^```(?P<kind>\w+)\n(?P<text>.*?)^```", re.M | re.S
)


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block of a page; `mark` is the comment right before it."""

    page: Path
    kind: str
    text: str
    mark: str | None

    def __str__(self) -> str:
        return f"{self.page.stem}: {self.text.strip().splitlines()[0][:40]}"


def blocks(page: Path) -> list[Block]:
    return [Block(page, m["kind"], m["text"], m["mark"]) for m in _BLOCK.finditer(read(page))]


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def rows(text: str) -> list[list[str]]:
    """The cells of every row of the tables in a text, heads and rules left out."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rules = [k for k, line in enumerate(lines) if set(line) <= set("|-: ")]
    kept = [line for k, line in enumerate(lines) if k not in rules and k + 1 not in rules]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in kept]


def under(heading: str, page: Path) -> str:
    """The text between a heading and the next one."""
    _, found, rest = read(page).partition(f"\n{heading}\n")
    assert found, f"{page.name} has no heading {heading!r}"
    return re.split(r"^#+ ", rest, maxsplit=1, flags=re.M)[0]


ALL_BLOCKS = [block for page in PAGES for block in blocks(page)]
PYTHON = [block for block in ALL_BLOCKS if block.kind == "python"]


# --- configuration --------------------------------------------------------------------

KEYED = {f"## `[{name}]`": cls for name, cls in SECTIONS.items()}
KEYED |= {f"### `{name}`": cls for name, cls in TASKS.items()}


def toml(value: Any) -> str:
    return json.dumps(value)


@pytest.mark.parametrize("heading", KEYED)
def test_every_key_is_described_with_its_default(heading: str) -> None:
    cls = KEYED[heading]
    hints = typing.get_type_hints(cls)
    described = {row[0].strip("`"): row for row in rows(under(heading, DOCS / "configuration.md"))}
    fields = {field.name: field for field in dataclasses.fields(cls)}
    assert described.keys() == fields.keys()
    said = {int: "whole number", float: "number", bool: "true or false", str: "string"}
    for name, field in fields.items():
        _, kind, default, meaning, valid = described[name]
        assert meaning, name
        assert default == f"`{toml(field.default)}`", name
        if typing.get_origin(hints[name]) is Literal:
            assert valid == ", ".join(f"`{choice}`" for choice in typing.get_args(hints[name]))
        else:
            assert kind == said[hints[name]], name


def test_every_task_is_described() -> None:
    (name,) = rows(under("## `[task]`", DOCS / "configuration.md"))
    assert name[-1] == ", ".join(f"`{task}`" for task in TASKS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_keys_named_in_prose_exist(page: Path) -> None:
    for section, key in re.findall(r"`(model|target|compress|train)\.(\w+)", read(page)):
        names = {field.name for field in dataclasses.fields(SECTIONS[section])}
        # `model` is also what programs call a model.
        # And the name of a package is also that of a section.
        package = section == "compress"
        module = package and importlib.util.find_spec(f"gaugelasso.{section}.{key}")
        if section == "model" and key in {*dir(torch.nn.Module), "safetensors", "spec"}:
            continue
        assert module or key in names, f"{section}.{key}"


@pytest.mark.parametrize("block", [b for b in ALL_BLOCKS if b.kind == "toml"], ids=str)
def test_configs_on_pages_are_valid(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tomllib.loads(block.text)
    if data["task"]["name"] not in TASKS:
        module = run_page(block.page)
        monkeypatch.setitem(TASKS, "running_max", module.RunningMax)  # type: ignore[arg-type]
    assert Config.from_dict(data).to_dict()["train"]["steps"] == data["train"]["steps"]


# --- names, links, commands -----------------------------------------------------------


def resolve(name: str) -> Any:
    """The object that a dotted name, relative to the package, stands for."""
    parts = ["gaugelasso", *name.removeprefix("gaugelasso.").split(".")]
    for end in range(len(parts) - 1, 0, -1):
        try:
            thing: Any = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            thing = getattr(thing, part)
        return thing
    raise AssertionError(name)


EQUATIONS = rows(read(DOCS / "equations.md").partition("## Differences")[0])
# Reference -> the functions that run in its place, as the page has them.
REFERENCES: dict[str, set[str]] = {}
for _, reference_cell, runs_cell, _ in EQUATIONS:
    if reference_cell != "–":
        REFERENCES.setdefault(reference_cell.strip("`"), set()).add(runs_cell.strip("`"))


def test_every_equation_has_one_function_that_exists() -> None:
    assert len(EQUATIONS) > 40
    for paper, plain, runs, _ in EQUATIONS:
        if runs != "not implemented":
            assert re.fullmatch(r"`[\w.]+`", runs), paper
            assert callable(resolve(runs.strip("`"))), paper
            assert not runs.startswith("`compress.reference."), paper
        if plain != "–":
            assert re.fullmatch(r"`compress\.reference\.\w+`", plain), paper
            assert callable(resolve(plain.strip("`"))), paper


def test_every_reference_is_on_the_equations_page() -> None:
    tree = ast.parse(read(Path(reference.__file__)))
    public = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    public = {f"compress.reference.{name}" for name in public if not name.startswith("_")}
    assert public == REFERENCES.keys()


@pytest.mark.parametrize("name", REFERENCES)
def test_a_test_compares_every_reference_with_what_runs(name: str) -> None:
    """Some test function calls both the reference and a function that the page names for it."""
    runs = {full.rpartition(".")[2] for full in REFERENCES[name]}
    call = f"reference.{name.rpartition('.')[2]}("
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.parse(text := read(path)).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                source = ast.get_source_segment(text, node) or ""
                if call in source and any(re.search(rf"\b{each}\(", source) for each in runs):
                    return
    raise AssertionError(f"no test calls {name} and one of {sorted(runs)}")


def test_every_name_on_the_equations_page_exists() -> None:
    named = re.findall(r"`([a-z_]+(?:\.\w+)+)`", read(DOCS / "equations.md"))
    for name in named:
        if name.rpartition(".")[2] not in {"json", "py", "toml", "md"}:
            resolve(name)


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", read(page), flags=re.M | re.S)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.+)$", read(target), re.M)
            assert anchor in map(slug, headings), link


COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def commands(program: str, pages: list[Path] = PAGES) -> list[str]:
    """The lines in shell blocks that call a program, each once."""
    shell = [block for page in pages for block in blocks(page) if block.kind == "sh"]
    lines = [line for block in shell for line in block.text.replace("\\\n", "").splitlines()]
    return list(dict.fromkeys(line for line in lines if line.startswith(f"{program} ")))


@pytest.mark.parametrize("line", commands("gaugelasso"))
def test_commands_on_pages_are_understood(line: str) -> None:
    _, name, *arguments = shlex.split(line)
    command = COMMANDS[name]
    # Parses, or raises; runs nothing.
    context = command.make_context(name, arguments)
    for change in context.params.get("set_") or []:
        section, _, key = change.partition("=")[0].partition(".")
        classes = TASKS.values() if section == "task" else [SECTIONS[section]]
        assert key in {f.name for cls in classes for f in dataclasses.fields(cls)}, change
    config = context.params.get("config")
    if config and config.parts[0] != "runs":  # there by an earlier command
        assert (ROOT / config).exists()
        for arm in parse_arms(context.params.get("arm") or [], ROOT):
            load_config(ROOT / config, dict(change.split("=") for change in arm.changes))


def test_every_command_is_on_the_quickstart() -> None:
    lines = commands("gaugelasso", [DOCS / "quickstart.md"])
    assert {line.split()[1] for line in lines} == COMMANDS.keys()


@pytest.mark.parametrize("line", commands("make"))
def test_make_targets_on_pages_exist(line: str) -> None:
    assert re.search(rf"^{line.split()[1]}:", read(ROOT / "Makefile"), re.M)


def test_every_block_says_what_it_is() -> None:
    # A block without a language is one that no test looks at.
    for page in PAGES:
        assert len(blocks(page)) == len(re.findall(r"^```", read(page), re.M)) / 2, page.name


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
        row[0].strip("`").replace("'", "")
        for row in rows(under("## What errors mean", DOCS / "your-model.md"))
    ]
    patterns = [re.compile(".*".join(map(re.escape, text.split("…")))) for text in explained]
    templates = error_templates()
    assert len(templates) > 10
    for template in templates:
        assert any(p.search(template) for p in patterns), f"not explained: {template}"
    for text, pattern in zip(explained, patterns, strict=True):
        assert any(map(pattern.search, templates)), f"no longer raised: {text}"


# --- programs -------------------------------------------------------------------------


def run_page(page: Path) -> types.ModuleType:
    """A module made of the page's runnable blocks, in order."""
    module = types.ModuleType(f"docs_{page.stem.replace('-', '_')}")
    for block in blocks(page):
        if block.mark == "runnable":
            exec(compile(block.text, str(page), "exec"), module.__dict__)
    return module


def load_example(path: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_python_on_pages_compiles(block: Block) -> None:
    ast.parse(textwrap.dedent(block.text))


QUOTES = [block for block in PYTHON if (block.mark or "").startswith("from ")]


@pytest.mark.parametrize("block", QUOTES, ids=str)
def test_quotes_are_verbatim(block: Block) -> None:
    assert block.text in read(ROOT / str(block.mark).removeprefix("from "))


def test_marks_are_known() -> None:
    for block in ALL_BLOCKS:
        mark = block.mark or "runnable"
        assert mark == "runnable" or mark.startswith("from examples/"), mark


def test_the_loop_on_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = (block for block in blocks(README) if block.kind == "python")
    tokens = torch.arange(8).view(1, 8)
    names: dict[str, Any] = {"batches": [(tokens, tokens)] * 2}
    exec(compile(block.text, str(README), "exec"), names)
    assert names["compressor"].steps == 2
    assert f"{names['compressor'].fma_initial:,.0f} ->" in capsys.readouterr().out


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_run(path: Path) -> None:
    compressor = load_example(path).main(steps=3)
    assert compressor.steps == 3
    assert all(parameter.isfinite().all() for parameter in compressor.model.parameters())


def test_the_task_on_its_page_trains(tmp_path: Path) -> None:
    # A target that is always met, so that compression is on after warm-up.
    page = run_page(DOCS / "your-task.md")
    summary = page.main(tmp_path / "run", steps=60, loss_target=100.0)
    assert summary["steps"] == 60
    assert len(read(tmp_path / "run" / "events.jsonl").splitlines()) == 1


def test_the_loop_on_its_page_saves_what_can_be_loaded(tmp_path: Path) -> None:
    page = run_page(DOCS / "your-task.md")
    compressor = page.own_loop(tmp_path / "checkpoint", steps=80, loss_target=100.0)
    assert compressor.history
    model = load_model(tmp_path / "checkpoint")
    assert model.structure() == compressor.structure
    inputs, _ = page.RunningMax().batch(2, Draw(0), "cpu")
    with torch.no_grad():
        assert torch.equal(model.eval()(inputs), compressor.model.eval()(inputs))


def test_the_running_maximum_is_one() -> None:
    task = run_page(DOCS / "your-task.md").RunningMax(vocabulary=9, length=7)
    tokens, labels = task.batch(3, Draw(5), "cpu")
    for position in range(7):
        assert torch.equal(labels[:, position], tokens[:, : position + 1].amax(dim=1))


@pytest.mark.parametrize("power", [1, 0])
def test_the_check_on_the_model_page_finds_a_wrong_power(power: int) -> None:
    check = run_page(DOCS / "your-model.md").check
    generator = torch.Generator().manual_seed(0)
    model = load_example(ROOT / "examples" / "your_model.py").Perceptron(4, 6, 3).double()
    model.bias.data.copy_(torch.randn(6, generator=generator))
    inputs = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    table = model.axis_table()
    riders = (axes.Slot("bias", 0, power=power),)
    hidden = dataclasses.replace(table["hidden"], riders=riders)
    model.axis_table = lambda: dataclasses.replace(table, axes=(hidden,))
    if power == 1:
        check(model, inputs)
        assert model.up.shape == (4, 5)
    else:
        with pytest.raises(AssertionError, match="hidden"):
            check(model, inputs)


def test_a_task_is_made_known_as_the_page_says(tmp_path: Path) -> None:
    page = DOCS / "your-task.md"
    package = tmp_path / "gaugelasso"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "src" / "gaugelasso", package, ignore=ignored)
    task = next(block.text for block in blocks(page) if block.mark == "runnable")
    (package / "tasks" / "running_max.py").write_text(task)
    (asked_line,) = re.findall(r"import it, `(from [^`]+)`", read(page))
    (asked_row,) = re.findall(r"a row to `TASKS`: `([^`]+)`", read(page))
    rooms = package / "tasks" / "__init__.py"
    lines = read(rooms).splitlines()
    # Where ruff wants it, not where it would happen to work.
    after = next(k for k, line in enumerate(lines) if "tasks.retrieval import" in line)
    lines.insert(after + 1, " ".join(asked_line.split()))
    lines.insert(next(k for k, line in enumerate(lines) if line.startswith("TASKS")) + 1, asked_row)
    rooms.write_text("\n".join(lines))
    config = tmp_path / "main.toml"
    config.write_text(next(block.text for block in blocks(page) if block.kind == "toml"))
    short = [f"train.{key}" for key in ("steps=20", "warmup=5", "cooldown=5", "final_batches=1")]
    changes = [word for change in (*short, "target.loss=9") for word in ("--set", change)]
    done = subprocess.run(
        [sys.executable, "-m", "gaugelasso", "train", config, "--out", tmp_path / "run", *changes],
        env={**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"},
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(read(tmp_path / "run" / "summary.json"))["task"] == "running_max"
