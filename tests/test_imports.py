"""Imports between packages go one way, and the siblings of the method do not know each other."""

import ast
from functools import cache
from graphlib import TopologicalSorter
from itertools import chain
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "gaugelasso"
FILES = sorted(PACKAGE.rglob("*.py"))
# Package or root module -> all that it may import of this package, lowest first.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "version": set(),
    "_moved": set(),
    "signals": set(),
    "memory": {"errors"},
    "axes": {"errors"},
    "kernels": {"errors"},
    "distributed": {"errors"},
    "files": {"errors"},
    "plugins": {"errors", "files"},
    "models": {"errors", "axes", "kernels", "files", "plugins"},
    "inference": {"errors", "memory", "kernels", "files", "models"},
    "compress": {"errors", "axes", "kernels", "distributed", "files", "plugins"},
    "checking": {"axes", "compress", "errors"},
    "integrations": {"errors", "compress"},
    "runs": {
        "errors", "memory", "version", "signals", "axes", "kernels", "files", "plugins", "models",
    },
    "importing": {"errors", "axes", "files", "models", "compress", "runs"},
    "export": {"errors", "version", "files", "models", "inference", "runs", "importing"},
    "tasks": {"errors", "kernels", "files", "plugins", "models"},
    "config": {"errors", "memory", "files", "plugins", "models", "compress", "runs", "tasks"},
    "training": {
        "errors", "signals", "axes", "kernels", "distributed", "compress", "runs", "tasks",
        "config",
    },
    "sweeps": {"errors", "signals", "files", "runs"},
    "bench": {
        "errors", "memory", "axes", "kernels", "models", "inference", "compress", "runs", "tasks",
        "config", "training",
    },
    "baselines": {
        "errors", "signals", "axes", "kernels", "distributed", "files", "models", "compress",
        "runs", "config", "training", "sweeps", "bench",
    },
    "report": {"errors", "files", "runs"},
    "cli": {
        "errors", "version", "signals", "memory", "axes", "distributed", "models", "inference",
        "plugins", "compress", "checking", "runs", "export", "importing", "tasks", "config",
        "training", "sweeps", "bench", "baselines", "report",
    },
    # The public names and the entry point; nobody inside imports them.
    "__init__": {
        "errors", "version", "_moved", "axes", "models", "compress", "checking", "runs",
        "importing", "training",
    },
    "__main__": {"cli"},
}  # fmt: skip
# Within the method: what is done to axes, each alone over the table, and what all of it shares.
SIBLINGS = {"pricing", "penalty", "gauge", "surgery", "split", "growth", "solver", "optim"}
SHARED = {"flat", "flat_optimizer", "groups", "gauge_factors"}


@cache
def names_imported(path: Path) -> set[tuple[str, ...]]:
    """Dotted names below gaugelasso that a file imports, wherever in the file it does so."""
    package = ("gaugelasso", *path.relative_to(PACKAGE).parent.parts)
    targets: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            targets += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            source = ".".join([*base, *filter(None, [node.module])])
            targets += [f"{source}.{alias.name}" for alias in node.names]
    split = (tuple(target.split(".")) for target in targets)
    return {parts[1:] for parts in split if parts[0] == "gaugelasso"}


def package_of(parts: tuple[str, ...]) -> str:
    """The package or root module that a name below gaugelasso belongs to."""
    found = parts and ((PACKAGE / parts[0]).is_dir() or (PACKAGE / f"{parts[0]}.py").exists())
    return parts[0] if found else "__init__"


def home(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_a_file_imports_what_its_package_may() -> None:
    assert set(map(home, FILES)) <= MAY_IMPORT.keys(), "say here what a new package may import"
    wrong = {}
    for path in FILES:
        imported = {package_of(parts) for parts in names_imported(path)} - {home(path)}
        if further := imported - MAY_IMPORT[home(path)]:
            wrong[str(path.relative_to(PACKAGE))] = further
    assert wrong == {}


def test_the_directions_have_no_cycle() -> None:
    TopologicalSorter(MAY_IMPORT).prepare()


def test_every_direction_is_used() -> None:
    used: dict[str, set[str]] = {name: set() for name in MAY_IMPORT}
    for path in FILES:
        used[home(path)] |= {package_of(parts) for parts in names_imported(path)} - {home(path)}
    assert used == MAY_IMPORT


def test_models_and_the_method_do_not_know_each_other() -> None:
    assert "compress" not in MAY_IMPORT["models"]
    assert "models" not in MAY_IMPORT["compress"]


def test_reports_know_run_folders_and_nothing_of_the_method() -> None:
    reached, rest = set(), {"report"}
    while rest:
        reached |= rest
        rest = set(chain.from_iterable(MAY_IMPORT[name] for name in rest)) - reached
    assert not reached & {"compress", "training"}
    assert [name for name, may in MAY_IMPORT.items() if "report" in may] == ["cli"]


@pytest.mark.parametrize("name", sorted(SIBLINGS))
def test_siblings_of_the_method_do_not_know_each_other(name: str) -> None:
    parts = names_imported(PACKAGE / "compress" / f"{name}.py")
    here = {each[1] for each in parts if each[0] == "compress"}
    documented = {"reference"} if name == "gauge" else set()  # names that it passes on
    assert here <= SHARED | documented


def test_nothing_runs_a_reference() -> None:
    """Tests import `compress/reference.py`; `gauge` passes two documented names on."""
    users = {
        (path.stem, parts[2])
        for path in FILES
        for parts in names_imported(path)
        if parts[:2] == ("compress", "reference")
    }
    assert users == {("gauge", "balance_"), ("gauge", "rescale_")}
    tree = ast.parse((PACKAGE / "compress" / "gauge.py").read_text())
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert not used & {name for _, name in users}


def test_the_root_holds_packages_and_few_modules() -> None:
    modules = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "__main__", "_moved"}
    assert modules == {"distributed", "errors", "memory", "signals", "version"}


def test_no_module_is_long() -> None:
    """transformers loads one file with the code of a model, so that has all of the model."""
    most = {"export/modeling_gaugelasso.py": 350}
    lengths = {str(path.relative_to(PACKAGE)): path.read_text().count("\n") for path in FILES}
    assert {path: long for path, long in lengths.items() if long > most.get(path, 300)} == {}


def test_the_walk_sees_the_imports_there_are() -> None:
    seen = names_imported(PACKAGE / "compress" / "model_state.py")
    assert {("axes", "named_tensors"), ("compress", "gauge"), ("compress", "surgery")} <= seen
