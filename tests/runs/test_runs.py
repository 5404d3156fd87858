"""The run folder: when it is opened, refused or replaced, and its logs."""

import inspect
import shutil
import subprocess
from pathlib import Path

import pytest

from gaugelasso.errors import UserError
from gaugelasso.files import durable
from gaugelasso.runs import environment
from gaugelasso.runs.folder import Existing, ReadOnlyRunFolder, RunFolder, RunFolderBase
from gaugelasso.runs.reading import read_rows
from gaugelasso.training.trainer import Trainer
from tests.tiny import QUICK, tiny
from tests.tiny_runs import Stop, assert_same_run, contents, finish, finished, newest, read, start


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of the tiny config."""
    return finished(tmp_path_factory.mktemp("runs"), **QUICK)


def test_an_existing_folder_is_refused(run: Path) -> None:
    before = contents(run)
    with pytest.raises(UserError, match=r"already exists; add --resume .* --overwrite"):
        Trainer(tiny(run.parent), run)
    assert contents(run) == before


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert (finish(tmp_path, **QUICK) / "summary.json").exists()


@pytest.mark.parametrize("existing", ["resume", "overwrite"])
def test_a_folder_that_holds_no_run_is_left_alone(tmp_path: Path, existing: Existing) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("irreplaceable")
    with pytest.raises(UserError, match=r"is not a run folder: .*nothing was changed"):
        start(tmp_path, existing=existing)
    assert contents(tmp_path / "run") == {"thesis.txt": b"irreplaceable"}


@pytest.mark.parametrize("existing", ["resume", "overwrite"])
@pytest.mark.parametrize("config", ['{"model_type": "bert"}', "[1, 2]", "{"])
def test_others_have_a_config_too(tmp_path: Path, existing: Existing, config: str) -> None:
    run = tmp_path / "run"
    (run / "report").mkdir(parents=True)
    (run / "report" / "thesis.txt").write_text("irreplaceable")
    (run / "config.json").write_text(config)
    if config != "{":  # with a log, it could be a run whose config is damaged
        (run / "metrics.jsonl").write_text('{"step": 3}\n')
    before = contents(run)
    with pytest.raises(UserError, match=r"is not a run folder: .*nothing was changed"):
        start(tmp_path, existing=existing)
    assert contents(run) == before


def test_a_run_is_one_whatever_its_config_has_become(tmp_path: Path) -> None:
    run = finished(tmp_path, **QUICK)
    (run / "config.json").write_text("{")
    start(tmp_path, existing="overwrite", **QUICK).run()
    assert set(read(run / "config.json")) >= {"task", "train"}


def test_a_damaged_run_may_be_removed_in_two_goes(tmp_path: Path) -> None:
    """After the first removal was interrupted, only these files were left."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text("{")
    (run / "overwriting.tmp").touch()
    start(tmp_path, existing="resume", **QUICK).run()
    assert (run / "summary.json").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [("a" * 300, "cannot be made: File name too long"), ("\udcff", "not UTF-8")],
)
def test_names_that_no_run_can_have(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        start(tmp_path, name)


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(UserError, match="is a file; give a folder"):
        start(tmp_path, existing="overwrite", **QUICK)


def test_overwriting_leaves_nothing_of_the_old_run(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    shutil.copytree(newest(run), tmp_path / "run" / "checkpoints" / "step-00000050.tmp")
    (tmp_path / "run" / "config.json.tmp").write_text("{")
    (tmp_path / "run" / "notes.txt").write_text("mine")
    RunFolder.open(tmp_path / "run", "overwrite").close()
    assert contents(tmp_path / "run") == {"notes.txt": b"mine"}


def test_an_overwritten_run_is_the_new_one(run: Path, tmp_path: Path) -> None:
    finished(tmp_path, train__seed=4, **QUICK)
    start(tmp_path, existing="overwrite", **QUICK).run()
    assert_same_run(run, tmp_path / "run")


def test_a_line_cut_short_by_a_crash_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 5}\n{"step": 10}\n{"st')
    assert list(read_rows(path)) == [{"step": 5}, {"step": 10}]


@pytest.mark.parametrize("line", ["{", "[]", '{"step": "x"}', '{"step": 5, "step": 5}', "\x00"])
def test_a_damaged_line_of_a_log_is_told(run: Path, tmp_path: Path, line: str) -> None:
    """A damaged row is an error: it must not be skipped without notice."""
    shutil.copytree(run, tmp_path / "run")
    path = tmp_path / "run" / "metrics.jsonl"
    path.write_text(line + "\n" + path.read_text())
    before = contents(tmp_path / "run")
    with pytest.raises(UserError, match=r"metrics\.jsonl': line 1 is damaged"):
        list(read_rows(path))
    with pytest.raises(UserError, match=r"metrics\.jsonl': damaged, its first"):
        start(tmp_path, existing="resume", **QUICK)
    assert contents(tmp_path / "run") == before


@pytest.mark.parametrize(
    "name", ["overwriting.tmp", "checkpoints", "summary.json", "metrics.jsonl", "config.json"]
)
def test_overwriting_broken_off_leaves_a_run_that_starts_over(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    finished(tmp_path, train__seed=4, **QUICK)
    inner = durable.remove

    def breaking(path: Path) -> None:
        inner(path)
        if path.name == name:
            raise Stop

    monkeypatch.setattr(durable, "remove", breaking)
    with pytest.raises(Stop):
        start(tmp_path, existing="overwrite", **QUICK)
    monkeypatch.undo()
    start(tmp_path, existing="resume", **QUICK).run()
    assert_same_run(run, tmp_path / "run")


def test_a_run_that_died_before_its_config_starts_over(run: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for name in ("run.lock", "config.json.tmp"):
        (tmp_path / "run" / name).write_text("{")
    start(tmp_path, existing="resume", **QUICK).run()
    assert_same_run(run, tmp_path / "run")


def operations(cls: type) -> set[str]:
    """Return the names of the public methods, without class methods and static methods."""
    methods = inspect.getmembers(cls, inspect.isfunction)
    static = {name for name in dir(cls) if isinstance(vars(cls).get(name), staticmethod)}
    return {name for name, _ in methods if not name.startswith("_")} - static


def test_every_operation_of_a_run_folder_is_defined_for_other_ranks() -> None:
    """An operation that is added to the writing folder must be defined for other ranks too."""
    assert operations(RunFolder) == operations(RunFolderBase)
    assert operations(RunFolderBase) <= vars(ReadOnlyRunFolder).keys()
    assert len(operations(RunFolder)) > 5


def test_a_read_only_run_folder_writes_nothing(tmp_path: Path) -> None:
    folder = ReadOnlyRunFolder(tmp_path / "run")
    folder.write("summary.json", {})
    folder.write_arrays("samples.npz", {})
    folder.append("metrics.jsonl", {"step": 1})
    assert folder.sync() == {}
    folder.saved()
    folder.rewind()
    folder.reopen()
    folder.close()
    assert folder.checkpoints == tmp_path / "run" / "checkpoints"
    assert not list(tmp_path.iterdir())


def test_a_change_anywhere_in_the_package_marks_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Figures of changed code must not be attributed to the commit."""
    package = tmp_path / "gaugelasso"
    (package / "runs").mkdir(parents=True)
    (package / "axes.py").write_text("")
    monkeypatch.setattr(environment, "__file__", str(package / "runs" / "environment.py"))
    monkeypatch.delenv("GAUGELASSO_COMMIT", raising=False)
    assert environment._commit() is None  # not a repository
    author = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    for words in (["init", "-q"], ["add", "."], [*author, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True, capture_output=True)
    head = environment._commit()
    assert head
    assert len(head) == 40
    (package / "axes.py").write_text("changed = True\n")
    assert environment._commit() == head + "+"
    monkeypatch.setenv("GAUGELASSO_COMMIT", "abc")
    assert environment._commit() == "abc"


def test_linked_checkpoints_are_refused(run: Path, tmp_path: Path) -> None:
    """The lock is in the run folder, so it does not protect checkpoints that are elsewhere."""
    for name in ("one", "other"):
        shutil.copytree(run, tmp_path / name)
    shutil.rmtree(tmp_path / "other" / "checkpoints")
    (tmp_path / "other" / "checkpoints").symlink_to(tmp_path / "one" / "checkpoints")
    before = contents(tmp_path)
    with pytest.raises(UserError, match=r"other/checkpoints' is a symbolic link to '.*/one/"):
        start(tmp_path, "other", existing="resume", **QUICK)
    assert contents(tmp_path) == before | {"tiny.toml": (tmp_path / "tiny.toml").read_bytes()}
    start(tmp_path, "other", existing="overwrite", **QUICK).run()
    assert not (tmp_path / "other" / "checkpoints").is_symlink()
    assert contents(tmp_path / "one") == contents(run)


def test_a_link_to_a_run_folder_is_the_run_folder(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "disk")
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    first = start(tmp_path, existing="resume", **QUICK)
    with pytest.raises(UserError, match="in use by another run"):
        start(tmp_path, "disk", existing="resume", **QUICK)
    first.run()
    assert_same_run(run, tmp_path / "disk")
