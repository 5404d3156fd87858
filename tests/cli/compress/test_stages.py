"""Stages of the command `compress`: what is there already, and what is replaced."""

import shutil
from pathlib import Path

import pytest

from gaugelasso.cli import app, compression_folder
from gaugelasso.cli.compression_folder import Stages
from gaugelasso.config import load_config
from gaugelasso.export import FORMS
from gaugelasso.importing.folder import write_imported
from gaugelasso.training.trainer import Trainer
from tests.cli.compress.commands import VOCABULARY, changed
from tests.command import Command, assert_user_error
from tests.tasks.tokenizers import byte_level
from tests.tiny_runs import assert_same_run, contents, read, stop_at


@pytest.mark.parametrize("steps", [0, 13])
def test_a_stopped_command_goes_on(steps: int, out: Path, gaugelasso: Command) -> None:
    """The config alone trains the same run: here its first steps."""
    shutil.move(out / "run", "expected")
    shutil.rmtree(out / "hf")
    before = contents(out)
    if steps:
        stop_at(Trainer(load_config(out / "config.toml"), out / "run"), steps)
    code, said, error = gaugelasso("compress", "model", *changed("--form", "native", "--resume"))
    assert code == 0, error
    assert ("resuming after step " in said) == (steps > 0)
    assert "import:" not in said
    assert "original:" not in said
    assert_same_run(Path("expected"), out / "run")
    assert (out / "native").is_dir()
    assert {name: data for name, data in contents(out).items() if name in before} == before


def test_a_finished_command_has_nothing_to_do(out: Path, gaugelasso: Command) -> None:
    before = contents(out)
    code, said, error = gaugelasso("compress", "model", *changed("--resume"))
    assert code == 0, error
    assert "Result" in said
    assert contents(out) == before
    code, said, error = gaugelasso("compress", "model", *changed("--resume", "--form", "native"))
    assert code == 0, error
    assert contents(out).items() > before.items()


def test_an_imported_folder_is_taken_as_it_is(place: Path, gaugelasso: Command) -> None:
    write_imported(Path("model"), Path("base"))
    options = changed("--form", "none", "--steps", "20")
    code, said, error = gaugelasso("compress", "base", *options)
    assert code == 0, error
    assert "import: copied from 'base'" in said
    assert contents(Path("out/base")) == contents(Path("base"))
    assert not any((place / "out" / form).exists() for form in FORMS)
    assert gaugelasso("compress", "base", *options, "--resume")[0] == 0
    before = contents(place / "out")
    write_imported(Path("other.gguf"), Path("other"))
    for model in ("other.gguf", "other"):
        answer = gaugelasso("compress", model, *options, "--resume")
        assert_user_error(answer, f"--resume: 'out/base' was not imported from '{model}'")
    assert contents(place / "out") == before


def test_overwrite_replaces_its_own_folder_alone(out: Path, gaugelasso: Command) -> None:
    options = changed("--overwrite", "--steps", "20", "--form", "none")
    before = contents(out)
    Path("empty.txt").write_text("")
    write = out / "notes.txt"
    write.write_text("mine")
    assert_user_error(gaugelasso("compress", "model", *options), "'out' holds 'notes.txt', which")
    write.unlink()
    for arguments, message in (
        (("out/base", *options), "--overwrite would remove 'out/base'"),
        (("nothing", *options), "'nothing'"),
        (("model", *options, "--valid", "nothing"), "--valid 'nothing': no such file or folder"),
        (("model", *options, "--valid", "out/config.toml"), "would remove 'out/config.toml'"),
        (("model", *options, "--data", "empty.txt"), "--data 'empty.txt': the text is empty"),
        (("model", *options, "--set", "train.stepz=3"), "stepz"),
    ):
        assert_user_error(gaugelasso("compress", *arguments), message)
    assert contents(out) == before
    code, _, error = gaugelasso("compress", "model", *options)
    assert code == 0, error
    assert read(out / "run" / "summary.json")["steps"] == 20
    assert not (out / "hf").exists()


# --- errors -----------------------------------------------------------------------------------


def test_an_existing_folder_is_kept(out: Path, place: Path, gaugelasso: Command) -> None:
    before = contents(out)
    for more, message in (
        ((), "output 'out' already exists; add --resume"),
        (("--resume", "--steps", "50"), "--resume: --steps is 50 now, and 30 in"),
        (("--resume", "--above-original", "500%"), "--resume: target.loss is"),
    ):
        assert_user_error(gaugelasso("compress", "model", *changed(*more)), message)
    (place / "file").write_text("")
    answer = gaugelasso("compress", "model", *changed("--out", "file", "--overwrite"))
    assert_user_error(answer, "output 'file' is a file")
    assert contents(out) == before


@pytest.mark.parametrize(
    ("token", "more", "message"),
    [
        ("<more>", (), "the model has the tokens 0 to 299"),
        ("", ("--length", "41"), "the model has 40 positions"),
        ("", ("--above-original", "2000%"), "names a loss of"),
    ],
)
def test_a_result_is_not_replaced_by_a_failure(
    token: str, more: tuple[str, ...], message: str, out: Path, gaugelasso: Command
) -> None:
    """Neither by one of the import, nor by one of what follows from the imported model."""
    before = contents(out)
    if token:
        byte_level(VOCABULARY, [token]).save("model/tokenizer.json")
    answer = gaugelasso("compress", "model", *changed("--overwrite", *more))
    assert_user_error(answer, message)
    assert contents(out) == before


def test_a_result_is_not_replaced_by_an_import_that_crashes(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: object) -> None:
        raise RuntimeError("a bug")

    before = contents(out)
    monkeypatch.setattr(compression_folder, "write_imported", crash)
    with pytest.raises(RuntimeError, match="a bug"):
        call("--overwrite")
    assert contents(out) == before


def call(*more: str) -> None:
    """The command without what turns an exception into an exit code."""
    app(["compress", "model", *changed(*more)], standalone_mode=False)


class Killed(BaseException):
    """Nothing is done after it."""


@pytest.mark.parametrize("moves", range(6))
def test_a_kill_while_the_old_result_is_set_aside_costs_nothing(
    moves: int, out: Path, gaugelasso: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, move = contents(out), compression_folder.move
    left = iter(range(moves))

    def killed(*paths: Path) -> None:
        if next(left, None) is None:
            raise Killed
        move(*paths)

    monkeypatch.setattr(compression_folder, "move", killed)
    with pytest.raises(Killed):
        call("--overwrite")
    assert sorted(contents(out).values()) == sorted(before.values())
    monkeypatch.setattr(compression_folder, "move", move)
    code, _, error = gaugelasso("compress", "model", *changed("--resume"))
    assert code == 0, error
    assert contents(out) == before


def test_a_kill_in_the_import_leaves_the_old_result_aside(out: Path, gaugelasso: Command) -> None:
    """It comes back where the next command fails, and is removed where that succeeds."""
    before = contents(out)
    Stages(out).set_aside()
    write_imported(Path("model"), out / "base")
    assert_user_error(
        gaugelasso("compress", "model", *changed("--overwrite", "--length", "41")), "40 positions"
    )
    assert contents(out) == before
    Stages(out).set_aside()
    write_imported(Path("model"), out / "base")
    more = ("--resume", "--steps", "20", "--form", "none")
    code, _, error = gaugelasso("compress", "model", *changed(*more))
    assert code == 0, error
    assert {path.name for path in out.iterdir()} == {"base", "original.json", "config.toml", "run"}
    assert read(out / "run" / "summary.json")["steps"] == 20


@pytest.mark.parametrize("option", ["--resume", "--overwrite"])
def test_what_a_killed_command_was_writing_is_removed(
    option: str, out: Path, gaugelasso: Command
) -> None:
    """It was taken for a file of someone else, and no option went on with the folder."""
    Stages(out).set_aside()
    for name in ("base.123.tmp", "hf.9.tmp"):
        (out / name / "checkpoints").mkdir(parents=True)
    (out / "config.toml.tmp").write_text("[task]")
    more = (option, "--steps", "20", "--form", "none")
    code, _, error = gaugelasso("compress", "model", *changed(*more))
    assert code == 0, error
    assert {path.name for path in out.iterdir()} == {"base", "original.json", "config.toml", "run"}


def test_half_of_an_old_result_does_not_come_back(
    out: Path, gaugelasso: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill while it is removed, when the new model is imported and measured."""

    def killed(path: Path) -> None:
        if (path / "config.toml").exists():
            (path / "config.toml").unlink()
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(compression_folder, "remove", killed)
        with pytest.raises(Killed):
            call("--overwrite")
    answer = gaugelasso("compress", "model", *changed("--overwrite", "--length", "41"))
    assert_user_error(answer, "40 positions")
    assert {path.name for path in out.iterdir()} == {"base", "original.json", "config.toml"}
