"""An imported model, texts, and a run of it."""

import shutil
from pathlib import Path

import pytest

from gaugelasso.training.trainer import Trainer
from tests.importing.bases import write_base
from tests.tasks.prose import write
from tests.tasks.tokenizers import WORDS
from tests.training.pretrained.configs import CONFIG, config


@pytest.fixture(scope="package")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An imported model, texts, a config, and a finished run."""
    folder = tmp_path_factory.mktemp("made")
    write_base(folder)
    write(folder / "train.txt", (WORDS * 5).encode())
    write(folder / "valid.txt", (WORDS * 3).encode())
    (folder / "run.toml").write_text(CONFIG)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GAUGELASSO_CACHE", str(folder / "cache"))
        patch.chdir(folder)
        Trainer(config(), Path("run")).run()
    return folder


@pytest.fixture
def place(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it all as the working directory, without the run."""
    monkeypatch.setenv("GAUGELASSO_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(made, tmp_path, ignore=lambda *_: {"run"}, dirs_exist_ok=True)


@pytest.fixture
def run(made: Path, place: Path) -> Path:
    shutil.copytree(made / "run", place / "run")
    return Path("run")
