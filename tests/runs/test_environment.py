"""The command that a run or a benchmark records is the one that was given."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from gaugelasso.runs.command import command


@pytest.mark.parametrize(
    ("module", "arguments", "expected"),
    [
        (None, ["/opt/bin/gaugelasso", "info", "runs/my run"], "gaugelasso info 'runs/my run'"),
        ("gaugelasso.__main__", ["/x/__main__.py", "info"], "gaugelasso info"),
        ("benchmarks.priced", ["/x/priced.py", "-q"], "python -m benchmarks.priced -q"),
        (None, ["my_loop.py", "--seed", "3"], "python my_loop.py --seed 3"),
        (None, [], "python"),
        (None, ["", "x"], "python"),
        ("ipykernel_launcher", ["/x/ipykernel_launcher.py", "-f", "/x/kernel.json"], "python"),
    ],
)  # fmt: skip
def test_the_command_as_it_was_typed(
    module: str | None, arguments: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = ModuleType("__main__")
    main.__spec__ = module and SimpleNamespace(name=module)  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "argv", arguments)
    assert command() == expected
