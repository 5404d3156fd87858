"""Each test imports its own copy of the user's files."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.plugins.own_code import write_code


@pytest.fixture(autouse=True)
def _forget_imports() -> Iterator[None]:
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name == "beside" or name.startswith(("gaugelasso_module_", "a_package")):
            del sys.modules[name]


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """The config of a run with a task and a model of the user."""
    return write_code(tmp_path / "code")
