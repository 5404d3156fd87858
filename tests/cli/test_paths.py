"""Names that a file system refuses: every command reports them in one line, with exit code 2."""

import os
from pathlib import Path
from typing import Any

import pytest

from gaugelasso import load_model
from gaugelasso.cli import benchmarks, profiles
from gaugelasso.errors import UserError
from gaugelasso.runs.reading import exists, is_folder
from tests.command import Command, assert_user_error
from tests.tiny import write_tiny
from tests.tiny_runs import finished

# One name is too long, or the whole path is.
TOO_LONG = {"a name": "a" * 300, "a path": "/".join(["b" * 200] * 30)}
# PATH is the name, CONFIG a valid config and RUN a valid run.
COMMANDS = (
    "info PATH",
    "eval PATH",
    "generate PATH",
    "show PATH",
    "advise PATH",
    "advise RUN --out PATH",
    "report PATH",
    "report RUN --out PATH",
    "pareto PATH",
    "pareto RUN --out PATH",
    "train PATH",
    "train CONFIG --out PATH",
    "train CONFIG --out PATH --resume",
    "train CONFIG --out PATH --overwrite",
    "compress PATH --data a.txt --above-original 3% --out PATH",
    "compress . --data a.txt --above-original 3% --out PATH",
    "bench PATH",
    "bench PATH --inference",
    "bench CONFIG --structure PATH",
    "bench CONFIG --repeats 3 --out PATH",
    "sweep PATH",
    "sweep CONFIG --out PATH",
    "sweep CONFIG --out PATH --resume",
    "sweep CONFIG --out PATH --cluster local",
    "sweep CONFIG --results PATH/results.json",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished(tmp_path_factory.mktemp("paths"))


@pytest.mark.parametrize("name", TOO_LONG.values(), ids=TOO_LONG.keys())
@pytest.mark.parametrize("words", COMMANDS)
def test_a_name_that_is_too_long(
    gaugelasso: Command, run: Path, tmp_path: Path, words: str, name: str
) -> None:
    places = {"PATH": tmp_path / name, "CONFIG": write_tiny(tmp_path), "RUN": run}
    for key, path in places.items():
        words = words.replace(key, str(path))
    assert_user_error(gaugelasso(*words.split()), "File name too long")


@pytest.mark.parametrize(
    "words",
    ["profile CONFIG", "bench CONFIG", "bench RUN --inference"],
)
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    gaugelasso: Command, run: Path, tmp_path: Path, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[str] = []
    monkeypatch.setattr(profiles, "Profile", measured.append)
    monkeypatch.setattr(benchmarks, "bench_step", measured.append)
    monkeypatch.setattr(benchmarks, "bench_run", measured.append)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    locked = tmp_path / "locked"
    locked.mkdir()
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != locked and access(path, mode))
    for key, path in {"CONFIG": write_tiny(tmp_path), "RUN": run}.items():
        words = words.replace(key, str(path))
    for place, why in {
        "file/new/x.json": "Not a directory",
        "folder": "Is a directory",
        "locked/new/x.json": "Permission denied",
    }.items():
        out = tmp_path / place
        before = set(tmp_path.rglob("*"))
        answer = gaugelasso(*words.split(), "--device", "cpu", "--out", out)
        assert_user_error(answer, f"output {str(out)!r} cannot be written: {why}")
        assert set(tmp_path.rglob("*")) == before
    assert not measured


def test_a_model_of_a_name_that_is_too_long(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="File name too long"):
        load_model(tmp_path / TOO_LONG["a name"])


def test_a_folder_that_may_not_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "stat", refuse)
    for look in (exists, is_folder):
        with pytest.raises(UserError, match=r"'private': cannot be read \(Permission denied\)"):
            look(Path("private"))


@pytest.mark.parametrize(
    "words", ["eval", "eval --data a.txt", "generate", "show", "export --form native", "info"]
)
def test_what_is_no_run_folder_is_called_so(
    gaugelasso: Command, tmp_path: Path, words: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "page.md").write_text("text")
    whys = {"page.md": "it is a file", "none": "no such folder", "empty": "config.json is missing"}
    command, *options = words.split()
    for name, why in whys.items():
        path = tmp_path / name
        answer = gaugelasso(command, path, *options)
        if name == "page.md" and command in ("eval", "generate"):  # imported folders do as well
            assert_user_error(answer, f"{str(path)!r} is a file; give a run folder, or an imported")
        else:
            assert_user_error(answer, f"{str(path)!r} is not a run folder: {why}")
