"""Damaged run folders on the command line: one line that names the file, and no traceback."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gaugelasso.errors import UserError
from gaugelasso.report.data import load_run
from gaugelasso.runs.folder import CONFIG_SECTIONS
from tests.command import Command, assert_user_error
from tests.report.folders import NEXT, make_run

COMMANDS = ("report", "advise", "info", "pareto")


def rewrite(path: Path, change: Callable[[dict[str, Any]], Any], line: int | None = None) -> None:
    """Apply `change` to a JSON file, or to one line of a log."""
    lines = path.read_text().splitlines()
    if line is None:
        lines = [json.dumps(change(json.loads(path.read_text())))]
    else:
        lines[line - 1] = json.dumps(change(json.loads(lines[line - 1])))
    path.write_text("\n".join(lines) + "\n")


DAMAGED: dict[str, tuple[str, int | None, Callable[[dict[str, Any]], Any], str]] = {
    "an empty summary": ("summary.json", None, lambda _: {}, "key 'seed' is missing"),
    "a summary that is a list": ("summary.json", None, lambda _: [], "the content is not a table"),
    "a row that is not a table": ("metrics.jsonl", 3, lambda _: 7, "line 3 is damaged"),
    "a row without a step": (
        "metrics.jsonl",
        3,
        lambda row: {key: value for key, value in row.items() if key != "step"},
        "line 3 is damaged",
    ),
    "a loss that is a string": (
        "metrics.jsonl", 2, lambda row: row | {"loss": "low"}, "'loss' is not a number or null",
    ),
    "steps out of order": (
        "metrics.jsonl", 4, lambda row: row | {"step": 3}, "'step' is smaller than in the",
    ),
    "an event without widths": (
        "events.jsonl", 2, lambda row: row | {"widths": 3}, "'widths' is not a table of whole",
    ),
    "widths that are not a table": (
        "initial.json", None, lambda data: data | {"widths": [8]}, "'widths' is not a table of",
    ),
    "a section that is not a table": (
        "config.json", None, lambda data: data | {"train": 3}, "'train' is not a table",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGED)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_damaged_file_is_named(
    gaugelasso: Command, tmp_path: Path, command: str, what: str
) -> None:
    name, line, change, message = DAMAGED[what]
    run = make_run(tmp_path / "run")
    rewrite(run / name, change, line)
    answer = gaugelasso(command, run)
    assert_user_error(answer, str(run / name))
    assert message in answer[2]
    assert not (run / "report").exists()


@pytest.mark.parametrize(
    "name", ["report/index.html", "report/profile.png", "report/tables.md", "pareto/pareto.md"]
)
def test_a_folder_where_a_file_should_go_is_named(
    gaugelasso: Command, tmp_path: Path, name: str, request: pytest.FixtureRequest
) -> None:
    if not name.endswith(".png"):
        request.getfixturevalue("undrawn")
    run = make_run(tmp_path / "run")
    (run / name).mkdir(parents=True)
    message = f"output '{run / name}' cannot be written: Is a directory"
    assert_user_error(gaugelasso(Path(name).parent, run), message)


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl", "summary.json"])
def test_a_folder_where_a_file_should_be_is_named(
    gaugelasso: Command, tmp_path: Path, name: str
) -> None:
    run = make_run(tmp_path / "run")
    (run / name).unlink()
    (run / name).mkdir()
    assert_user_error(gaugelasso("info", run), str(run / name))


WRONG_VALUES = (None, -1, 1.5, "x", True, [1], {"a": "b"}, float("nan"), 10**400)


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("summary.json", ["steps", "fma_initial", "metric", "figures", "returns", "next_to_go"]),
        ("initial.json", ["fma", "widths", "structure", "metric"]),
        ("config.json", [*CONFIG_SECTIONS]),
        ("events.jsonl", ["step", "fma_before", "fma", "dropped", "removed", "widths", "refused"]),
        ("metrics.jsonl", ["step", "phase", "fma"]),
        ("environment.json", ["date", "commit", "hardware", "command"]),
    ],
)
def test_no_value_causes_a_traceback(
    gaugelasso: Command, tmp_path: Path, name: str, keys: list[str]
) -> None:
    """Each value is shown, or refused in one line."""
    run = make_run(tmp_path / "run", next_to_go=NEXT)
    original, line = (run / name).read_text(), 2 if name.endswith("l") else None
    refused = 0
    for key in keys:
        for value in WRONG_VALUES:
            rewrite(run / name, lambda data, new={key: value}: data | new, line)
            answer = gaugelasso("info", run)
            if answer[0]:
                assert_user_error(answer, str(run / name))
            refused += bool(answer[0])
            (run / name).write_text(original)
    assert refused >= 6 * len(keys)


def test_a_log_that_ends_before_its_run_is_said(
    gaugelasso: Command, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = make_run(tmp_path / "run")

    def said(command: str) -> str:
        caplog.clear()
        assert gaugelasso(command, run)[0] == 0
        return "\n".join(record.message for record in caplog.records)

    assert [said(command) for command in COMMANDS[::2]] == ["", ""]
    os.truncate(run / "metrics.jsonl", 500)
    for command in COMMANDS[::2]:
        assert said(command) == (
            f"warning: '{run / 'metrics.jsonl'}' is incomplete: it ends at step 20, and the run "
            "has 100 (summary.json); curves and step times are of its rows alone"
        )
    (run / "metrics.jsonl").unlink()
    os.truncate(run / "events.jsonl", 1000)
    assert "metrics.jsonl' is incomplete: it ends at step 0" in said("info")
    assert "events.jsonl' is incomplete: it does not lead to the final model" in said("info")
    (run / "summary.json").unlink()
    assert said("info") == ""  # as of a run in progress


def test_a_run_of_an_early_build_is_read(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    rewrite(run / "initial.json", lambda data: {key: data[key] for key in ("fma", "widths")})
    assert load_run(run).layers == 2
    rewrite(run / "summary.json", lambda data: data | {"loss": None, "wall_s": float("inf")})
    assert load_run(run).summary is not None
    rewrite(run / "summary.json", lambda data: data | {"metric": {"name": "accuracy"}})
    with pytest.raises(UserError, match=r"summary\.json': key 'metric\.value' is missing"):
        load_run(run)
