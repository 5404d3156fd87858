"""A run that the command has made."""

import shutil
from pathlib import Path

import pytest

from tests.command import Answer, run_process
from tests.tiny import write_tiny


@pytest.fixture(scope="package")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny config, changed so that an operator is left at the end."""
    path = write_tiny(tmp_path_factory.mktemp("cli"))
    path.write_text(path.read_text().replace("[compress]", "[compress]\npowers_of_two = true"))
    return path


@pytest.fixture(scope="package")
def trained(config: Path) -> tuple[Path, Answer]:
    """A run made by the command itself, and the command's output."""
    out = config.parent / "a folder with [brackets]"
    return out, run_process("train", config, "--out", out)


@pytest.fixture
def run(trained: tuple[Path, Answer], tmp_path: Path) -> Path:
    """A copy of that run."""
    return Path(shutil.copytree(trained[0], tmp_path / "run"))
