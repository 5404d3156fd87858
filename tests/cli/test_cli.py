"""What all commands share: usage errors, launchers, crashes, and help."""

import signal
import subprocess
from pathlib import Path

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from gaugelasso import cli
from gaugelasso.version import __version__
from tests import warm
from tests.command import Command, assert_user_error

# --- train: bad input ----------------------------------------------------------------


def test_brackets_in_an_error_are_not_markup(gaugelasso: Command) -> None:
    for name in ("[bold]", "[red]x[", "[/]"):
        assert_user_error(gaugelasso("train", f"{name}.toml"), f"{name}.toml")


@pytest.mark.parametrize(
    "arguments",
    [["train"], ["fly"], ["train", "x.toml", "--fast"], ["eval"], ["report"], ["info"], ["advise"]],
    ids=" ".join,
)
def test_invalid_arguments_are_a_usage_error(gaugelasso: Command, arguments: list[str]) -> None:
    code, _, err = gaugelasso(*arguments)
    assert code == 2
    assert "Usage" in err


# --- train: the output folder --------------------------------------------------------


def test_a_launcher_receives_a_user_error(
    gaugelasso: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it torchrun prints only its own traceback."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    assert_user_error(gaugelasso("train", tmp_path / "none.toml"), "no such file")
    failure = ProcessFailure(0, 1, 2, str(tmp_path / "error.json"))
    message = ChildFailedError("gaugelasso", {0: failure}).format_msg()
    assert f"config {str(tmp_path / 'none.toml')!r}: no such file" in message


def test_a_launcher_receives_an_unexpected_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(cli, "app", fail)
    monkeypatch.setattr(cli, "set_up_process", lambda: None)
    for path in (tmp_path / "error.json", tmp_path / "no" / "such" / "folder.json"):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
        with pytest.raises(RuntimeError, match="a bug"):
            cli.main()
    failure = ProcessFailure(0, 1, 1, str(tmp_path / "error.json"))
    message = ChildFailedError("gaugelasso", {0: failure}).format_msg()
    assert "RuntimeError: a bug" in message
    assert [path.name for path in tmp_path.iterdir()] == ["error.json"]


@pytest.mark.parametrize(
    ("error", "needed"),
    [
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 4096000000 "
                      "bytes."), " (4.1 GB more were needed)"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has"),
         " (20.00 GiB more were needed)"),
        (MemoryError(), ""),
        (RuntimeError("std::bad_alloc"), ""),
    ],
    ids=repr,
)  # fmt: skip
def test_a_lack_of_memory_is_one_line(
    gaugelasso: Command, monkeypatch: pytest.MonkeyPatch, error: Exception, needed: str
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(cli, "app", fail)
    assert_user_error(gaugelasso("train"), f"out of memory{needed}: give a smaller batch")


def test_a_crash_prints_the_stack() -> None:
    crash = "import os; from gaugelasso import cli; cli.app = os.abort; cli.main()"
    crashed = subprocess.run([warm.python(), "-c", crash], capture_output=True, text=True)
    assert crashed.returncode == -signal.SIGABRT
    assert "Fatal Python error: Aborted" in crashed.stderr
    assert 'cli/__init__.py", line ' in crashed.stderr


# --- help ----------------------------------------------------------------------------


def test_the_version_is_printed(gaugelasso: Command) -> None:
    code, out, _ = gaugelasso("--version")
    assert (code, out.strip()) == (0, __version__)


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_help_with_an_example(gaugelasso: Command, command: str) -> None:
    code, out, _ = gaugelasso(command, "--help")
    assert code == 0
    assert f"Example: gaugelasso {command} " in out


def test_paragraphs_of_help_are_broken_at_the_width_of_the_terminal_alone(
    gaugelasso: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at the ends of lines of the docstring as well."""
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 80)
    page = gaugelasso("cofi", "--help")[1].partition("Example:")[0]
    paragraph = page[page.index("RUN is") : page.index("The default")].splitlines()
    assert len(paragraph) == 4
    assert all(len(line.strip()) > 65 for line in paragraph[:-1])


def test_the_help_of_the_program_lists_the_commands_and_an_example(gaugelasso: Command) -> None:
    code, out, _ = gaugelasso("--help")
    assert code == 0
    assert "Example: gaugelasso train " in out
    assert all(f" {command} " in out for command in cli.COMMANDS)
