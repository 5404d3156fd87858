"""What a wheel is made of, read off pyproject.toml: building one would need the network."""

import importlib
import tomllib
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "gaugelasso"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
WHEEL = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
SUFFIXES = {".py", ".css", ".js"}
SOURCES = [
    path for path in PACKAGE.rglob("*") if path.suffix in SUFFIXES or path.name == "py.typed"
]


def test_the_wheel_takes_the_whole_package() -> None:
    assert [ROOT / path for path in WHEEL["packages"]] == [PACKAGE]
    assert not WHEEL.keys() & {"include", "exclude", "only-include"}


def test_every_folder_with_code_is_a_package() -> None:
    assert len({path.parent for path in SOURCES}) > 3
    for path in SOURCES:
        assert (path.parent / "__init__.py").is_file(), path


def test_no_source_is_ignored() -> None:
    # What git ignores, hatchling leaves out: a room called data/ or build/ would be lost.
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").split()
    for path in SOURCES:
        top, *below = path.relative_to(ROOT).parts
        for pattern in ignored:
            parts = [top] if pattern.startswith("/") else [top, *below]
            assert not any(fnmatch(part, pattern.strip("/")) for part in parts), path


def test_a_typed_package_says_so() -> None:
    assert "Typing :: Typed" in PROJECT["project"]["classifiers"]
    assert PACKAGE / "py.typed" in SOURCES


def test_what_the_project_names_is_there() -> None:
    module, _, function = PROJECT["project"]["scripts"]["gaugelasso"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))
    for path in (
        PROJECT["tool"]["hatch"]["version"]["path"],
        PROJECT["project"]["readme"],
        *PROJECT["project"]["license-files"],
    ):
        assert (ROOT / path).is_file(), path
