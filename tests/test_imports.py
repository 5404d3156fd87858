"""Lower floors never import upper ones."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "gaugelasso"
FLOORS = {
    **dict.fromkeys(["errors", "version", "axes", "storage", "groups", "events"], 0),
    **dict.fromkeys(["kernels", "durable", "tensors", "rng", "lock", "signals", "strict"], 0),
    **dict.fromkeys(["ranks", "stopwatch", "tempo"], 0),
    **dict.fromkeys(["pricing", "penalty", "gauge", "surgery", "split", "solver", "optim"], 1),
    **dict.fromkeys(["models", "means"], 1),
    **dict.fromkeys(
        ["drop", "budget", "accord", "options", "graph", "pace", "guard", "body", "choice"], 2
    ),
    "compressor": 3,
    **dict.fromkeys(["tasks", "config", "checkpoint", "schedule", "runs", "evaluation"], 4),
    **dict.fromkeys(["manifest", "memory", "resume", "watch", "logs"], 4),
    **dict.fromkeys(
        ["step", "state", "ending", "books", "trainer", "display", "bench", "report", "show"], 5
    ),
    **dict.fromkeys(["arms", "worker", "cluster", "sweep", "cli"], 6),
    # The public names and the entry point see everything; nobody inside sees them.
    **dict.fromkeys(["__init__", "__main__"], 7),
}
# Floor 1 holds siblings that do not know each other.
SIBLINGS = 1


def room(path: Path) -> str:
    """The module or subpackage of gaugelasso that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """The rooms that a file imports, wherever in the file it does so."""
    package = ("gaugelasso", *path.relative_to(PACKAGE).parent.parts)
    targets: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            targets += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            source = ".".join([*base, *filter(None, [node.module])])
            targets += [f"{source}.{alias.name}" for alias in node.names]
    found = set()
    for parts in (target.split(".") for target in targets):
        if parts[0] == "gaugelasso":
            name = parts[1] if len(parts) > 1 else "__init__"
            is_room = (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").exists()
            found.add(name if is_room else "__init__")
    return found


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down(path: Path) -> None:
    here = room(path)
    assert here in FLOORS, f"{here} has no floor: give it one in {Path(__file__).name}"
    for there in imported(path) - {here}:
        assert FLOORS[there] <= FLOORS[here], f"{here} imports {there}, which is above it"
        if FLOORS[here] == SIBLINGS:
            assert FLOORS[there] < SIBLINGS, f"{here} imports its sibling {there}"


def test_models_know_table_and_kernels_alone() -> None:
    for path in FILES:
        if room(path) == "models":
            assert imported(path) <= {"models", "axes", "errors", "kernels"}, path


def test_only_the_command_line_imports_the_report() -> None:
    importers = {room(path) for path in FILES if "report" in imported(path)}
    assert importers <= {"cli", "report"}


def test_the_walk_sees_the_imports_there_are() -> None:
    assert {"axes", "gauge", "drop", "surgery"} <= imported(PACKAGE / "body.py")
