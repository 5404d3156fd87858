"""What pages name exists: functions, public names, links, files and commands."""

import ast
import dataclasses
import functools
import importlib
import re
import shlex
from pathlib import Path

import pytest

import gaugelasso
from gaugelasso import axes
from gaugelasso.compress import reference
from gaugelasso.config import load_config
from gaugelasso.sweeps.arms import parse_arms
from gaugelasso.tasks import TASKS
from tests.docs.pages import (
    COMMAND_LINE,
    COMMANDS,
    EQUATIONS,
    PAGES,
    PYTHON_API,
    ROOT,
    SECTIONS,
    WHERE_THINGS_ARE,
    commands,
    page_id,
    read,
    resolve,
    rows,
    under,
)

EQUATION_ROWS = rows(read(EQUATIONS).partition("## Differences")[0])
# Reference -> the functions that run in its place, as the page has them.
REFERENCES: dict[str, set[str]] = {}
for _, reference_cell, runs_cell, _ in EQUATION_ROWS:
    if reference_cell != "–":
        REFERENCES.setdefault(reference_cell.strip("`"), set()).add(runs_cell.strip("`"))


def test_every_equation_has_one_function_that_exists() -> None:
    assert len(EQUATION_ROWS) > 40
    for paper, plain, runs, _ in EQUATION_ROWS:
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


@functools.cache
def functions_of_tests() -> list[str]:
    """The source of every test function."""
    sources = []
    for path in (ROOT / "tests").rglob("test_*.py"):
        text = read(path)
        lines = text.splitlines(keepends=True)
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                sources.append("".join(lines[node.lineno - 1 : node.end_lineno]))
    return sources


@pytest.mark.parametrize("name", REFERENCES)
def test_a_test_compares_every_reference_with_what_runs(name: str) -> None:
    """Some test function calls both the reference and a function that the page names for it."""
    runs = {full.rpartition(".")[2] for full in REFERENCES[name]}
    call = f"reference.{name.rpartition('.')[2]}("
    for source in functions_of_tests():
        if call in source and any(re.search(rf"\b{each}\(", source) for each in runs):
            return
    raise AssertionError(f"no test calls {name} and one of {sorted(runs)}")


def test_every_name_on_the_equations_page_exists() -> None:
    named = re.findall(r"`([a-z_]+(?:\.\w+)+)`", read(EQUATIONS))
    for name in named:
        if name.rpartition(".")[2] not in {"json", "py", "toml", "md"}:
            resolve(name)


# --- links, files and public names ---------------------------------------------------


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=page_id)
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


@pytest.mark.parametrize("line", commands("gaugelasso"))
def test_commands_on_pages_are_understood(line: str) -> None:
    _, name, *arguments = shlex.split(line, comments=True)
    command = COMMANDS[name]
    # Parses, or raises; runs nothing.
    context = command.make_context(name, arguments)
    for change in context.params.get("set_") or []:
        section, _, key = change.partition("=")[0].partition(".")
        classes = TASKS.values() if section == "task" else [SECTIONS[section]]
        assert key in {f.name for cls in classes for f in dataclasses.fields(cls)}, change
    config = context.params.get("config")
    # There by an earlier command, or a config that a page shows.
    if config and config.parts[0] not in ("runs", "smol.toml"):
        assert (ROOT / config).exists()
        for arm in parse_arms(context.params.get("arm") or [], ROOT):
            load_config(ROOT / config, dict(change.split("=") for change in arm.changes))


def test_every_command_has_an_example_on_its_page() -> None:
    lines = commands("gaugelasso", [COMMAND_LINE])
    assert {line.split()[1] for line in lines} == COMMANDS.keys()
    listed = re.findall(r"^\| \[`([\w-]+)`\]", read(COMMAND_LINE), re.M)
    assert sorted(listed) == sorted(COMMANDS)


@pytest.mark.parametrize("line", commands("make"))
def test_make_targets_on_pages_exist(line: str) -> None:
    assert re.search(rf"^{line.split()[1]}:", read(ROOT / "Makefile"), re.M)


def test_every_public_name_is_on_its_page() -> None:
    documented = set(re.findall(r"^::: gaugelasso\.(\w+)$", read(PYTHON_API), re.M))
    assert documented == {*gaugelasso.__all__} - {"__version__"}
    for name in re.findall(r"^::: ([\w.]+)$", read(PYTHON_API), re.M):
        resolve(name)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("checkpoint", "runs.checkpoint"),
        ("compressor", "compress.compressor"),
        ("display", "cli.display"),
        ("drop", "compress.drop"),
        ("gauge", "compress.gauge"),
        ("guard", "compress.guard"),
        ("optim", "compress.optim"),
        ("options", "compress.options"),
        ("penalty", "compress.penalty"),
        ("pricing", "compress.pricing"),
        ("ranks", "distributed"),
        ("schedule", "training.schedule"),
        ("solver", "compress.solver"),
        ("split", "compress.split"),
        ("step", "training.step"),
        ("surgery", "compress.surgery"),
        ("tasks.streams", "tasks.protocol"),
        ("trainer", "training.trainer"),
    ],
)
def test_paths_of_earlier_pages_still_import(old: str, new: str) -> None:
    former, present = (importlib.import_module(f"gaugelasso.{path}") for path in (old, new))
    assert former is present


def test_every_package_has_its_row() -> None:
    package = Path(axes.__file__).parents[1]
    cells = [row[0].strip("`") for row in rows(under("## The packages", WHERE_THINGS_ARE))]
    there = {f"{path.name}/" for path in package.iterdir() if (path / "__init__.py").exists()}
    there |= {path.name for path in package.glob("*.py")} - {"__init__.py", "__main__.py"}
    assert set(cells) == there


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_files_named_on_pages_exist(page: Path) -> None:
    # The log is history: it names files by the paths of its time.
    if page.name == "log.md":
        return
    folders = "src|tests|docs|configs|examples|benchmarks|results"
    for path in re.findall(rf"`((?:{folders})/[\w./-]+)", read(page)):
        new = path.startswith(("configs/running_max", "src/gaugelasso/tasks/running_max"))
        assert new or (ROOT / path).exists(), path
