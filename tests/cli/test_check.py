"""The command check: a table and 0, findings and 1, bad input and 2."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.command import Command, assert_user_error, calling
from tests.examples import EXAMPLES

PERCEPTRON = (EXAMPLES / "your_model.py").read_text().partition("def main")[0]
PARTS = """
def build():
    torch.manual_seed(0)
    return Perceptron(8, 6, 3)

def batch():
    return torch.ones(4, 8), torch.ones(4, 3)
"""


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Command]:
    yield from calling(monkeypatch, capsys)


def write(folder: Path, text: str) -> str:
    path = folder / "my.py"
    path.write_text(text)
    return f"{path}:build"


def test_a_sound_model(call: Command, tmp_path: Path) -> None:
    code, out, err = call("check", write(tmp_path, PERCEPTRON + PARTS), "--steps", "80")
    assert (code, err) == (0, "")
    assert [line.split()[:2] for line in out.splitlines()] == [
        [name, "pass"] for name in ("table", "gauge", "zero", "rebuild", "cost", "training")
    ]


def test_a_wrong_power_is_named(call: Command, tmp_path: Path) -> None:
    text = PERCEPTRON.replace("power=1", "power=2") + PARTS
    code, out, _ = call("check", write(tmp_path, text), "--steps", "5")
    assert code == 1
    assert "rider Slot('bias', 0) has power=2, and power=1 is exact" in out


def test_the_loss_of_the_file_is_used(call: Command, tmp_path: Path) -> None:
    text = PERCEPTRON + PARTS + "\ndef loss(outputs, targets):\n    raise RuntimeError('mine')\n"
    code, out, _ = call("check", write(tmp_path, text))
    assert code == 1
    assert "RuntimeError: mine" in out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("build = 3\n", "it is a int, not a function"),
        ("def build(width): pass\n", "must be callable without arguments"),
        ("def build():\n    raise KeyError('width')\n", "it raised KeyError: 'width'"),
        ("def build():\n    return 3\n", "returns a int, not a gaugelasso.Compressible"),
        (PERCEPTRON + PARTS.replace("batch", "other"), "has no 'batch'"),
        (PERCEPTRON + PARTS.replace(", torch.ones(4, 3)", ""), "returns no pair"),
    ],
)
def test_bad_input(call: Command, tmp_path: Path, text: str, message: str) -> None:
    assert_user_error(call("check", write(tmp_path, text)), message)
    assert_user_error(call("check", "absent.py:build"), "absent.py:build': no such file")
