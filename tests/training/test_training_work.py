"""What a run counts as training work: its own steps, a teacher's, and the runs that it needs."""

import json
import shutil
from itertools import pairwise
from pathlib import Path

import pytest

from gaugelasso.runs.training_work import behind_weights, entry_of
from tests.tiny_runs import finish, finished, read, rows

TEACHER = "the run of train.teacher"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The tiny run, finished."""
    return finished(tmp_path)


def work_of_steps(run: Path) -> float:
    """The work of the structure at each step."""
    summary, events = read(run / "summary.json"), rows(run, "events.jsonl")
    marks = [0, *(event["step"] for event in events), summary["steps"]]
    sizes = [summary["fma_initial"], *(event["fma"] for event in events)]
    assert len(set(sizes)) > 2
    spans = (end - start for start, end in pairwise(marks))
    return float(sum(size * span for size, span in zip(sizes, spans, strict=True)))


def test_training_work_is_the_work_of_every_step(run: Path) -> None:
    assert read(run / "summary.json")["training_fma"] == work_of_steps(run)


def test_training_work_counts_a_teacher(run: Path) -> None:
    """Its forward pass at every step, a third of a training step, and the training of its run."""
    teacher = read(run / "summary.json")
    student = finish(run.parent, "student", train__teacher=str(run), train__distill=0.5)
    found = read(student / "summary.json")
    passes = found["steps"] * teacher["fma_final"] / 3
    assert found["training_fma"] == pytest.approx(work_of_steps(student) + passes)
    assert found["training_work"] == {
        "own": found["training_fma"],
        "before": teacher["training_fma"],
        "total": found["training_fma"] + teacher["training_fma"],
        "needs": TEACHER,
    }


def test_what_is_behind_a_teacher_may_not_be_known(run: Path) -> None:
    summary = run / "summary.json"
    assert behind_weights({TEACHER: run}, "fma") == {TEACHER: read(summary)["training_fma"]}
    # Milliseconds are no work: such a run counts FMA.
    assert behind_weights({TEACHER: run}, "latency") == behind_weights({TEACHER: run}, "fma")
    assert behind_weights({TEACHER: run}, "paper") == {TEACHER: None}
    summary.unlink()
    assert behind_weights({TEACHER: run}, "fma") == {TEACHER: None}


def test_an_imported_model_is_no_run(run: Path) -> None:
    shutil.copytree(run, run.parent / "imported")
    config = run.parent / "imported" / "config.json"
    config.write_text(json.dumps(read(config) | {"task": {"name": "imported"}}))
    assert behind_weights({TEACHER: config.parent}, "fma") == {}


def test_a_teacher_beside_a_given_structure_does_not_count_twice() -> None:
    """The run that found the structure may have had the same one."""
    given = entry_of({"training_fma": 5.0}, 1.0, {TEACHER: 2.0})["training_work"]
    assert (given["own"], given["before"], given["total"]) == (5.0, None, None)
    assert TEACHER in given["needs"]
    alone = entry_of({"training_fma": 5.0}, None, {TEACHER: 2.0})["training_work"]
    assert (alone["own"], alone["before"], alone["total"]) == (5.0, 2.0, 7.0)
