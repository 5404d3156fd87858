"""Rivals on small tasks: rows of several calls stay in one file, and a table shows each seed."""

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.kept_rows import write_beside
from benchmarks.small_rivals import KEYS
from benchmarks.small_tables import RIVALS, rivals_section

from gaugelasso.errors import UserError

COMMAND = "python -m benchmarks.small_rivals"


def row(method: str, seed: int, loss: float | None = 0.5, **changes: Any) -> dict[str, Any]:
    made = {
        "task": "sorting", "seed": seed, "named": 0.15, "method": method, "share": 1.0,
        "holds": False, "fma_final": 1000.0, "training_fma": 2e6, "loss": loss,
    }  # fmt: skip
    return made | changes


def refused(method: str, seed: int) -> dict[str, Any]:
    made = row(method, seed, refused="cannot be reached")
    return {key: made[key] for key in made if key not in ("fma_final", "training_fma", "loss")}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / RIVALS).parent.mkdir(parents=True)
    return tmp_path


def lines(root: Path, rows: list[dict[str, Any]]) -> list[str]:
    data = {"command": COMMAND, "hardware": "CPU", "date": "2026", "rows": rows}
    (root / RIVALS).write_text(json.dumps(data))
    return rivals_section(root)


def test_a_cell_has_the_mean_work_and_the_loss_of_each_seed(root: Path) -> None:
    made = lines(
        root,
        [
            row("compression", 42, 0.1, holds=True),
            row("compression", 43, 0.2, fma_final=1101.0),
            row("cofi", 42, None, training_fma=3e6),
            refused("cofi", 43),
            row("uniform", 42, 0.3, training_fma=1e6),
            refused("post-hoc", 42),
        ],
    )
    assert "| compression to the target loss | 1,050 **0.1** 0.2 | 1.0–1.0 |" in made
    assert "| CoFi | 1,000 not finite refused | 1.5–1.5 |" in made
    assert "| uniform | 1,000 0.3 — | 0.5–0.5 |" in made
    assert "| post-hoc pruning | refused — | — |" in made


def test_a_table_has_the_methods_that_were_asked_for_this_share(root: Path) -> None:
    rows = [row("compression", 42), row("cofi", 42), row("uniform", 42)]
    made = lines(root, [*rows, row("cofi", 42, 0.7, share=0.5)])
    half = made[made.index("What has the loss was asked for half of the work:") :]
    assert "| CoFi | 1,000 0.7 | 1.0–1.0 |" in half
    assert not any(line.startswith("| uniform") for line in half)


def test_no_file_is_no_section(tmp_path: Path) -> None:
    assert rivals_section(tmp_path) == []


def test_a_method_without_a_name_is_refused(root: Path) -> None:
    with pytest.raises(UserError, match=r"rivals\.json: no row or column for 'new' on 'sorting'"):
        lines(root, [row("new", 42)])


def test_rows_of_other_tasks_seeds_and_methods_stay(tmp_path: Path) -> None:
    path = tmp_path / "rivals.json"
    others = [row("cofi", 43), row("cofi", 42, task="text"), row("post-hoc", 42)]
    old = [row("cofi", 42), row("cofi", 42, share=0.5), *others]
    path.write_text(json.dumps({"command": COMMAND, "note": "kept", "rows": old}))
    new = [row("cofi", 42, 0.9), row("uniform", 42)]
    write_beside(path, new, KEYS)
    data = json.loads(path.read_text())
    assert data["rows"] == [*others, *new]
    assert data["note"] == "kept"
    assert data["command"].split("; ")[0] == COMMAND
