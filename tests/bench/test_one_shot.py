"""One-shot cuts, on a tiny random model: what is measured, what least squares keeps, the rows."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from benchmarks import one_shot, one_shot_scores
from benchmarks.smollm2 import all_kept, fma_of, state_of

from gaugelasso.models import Transformer
from gaugelasso.models.operators import SwiGLU
from gaugelasso.runs.checkpoint import load_model
from gaugelasso.tasks import Draw, Tokens
from tests.importing.bases import write_base
from tests.tasks.prose import write

pytestmark = pytest.mark.usefixtures("own_cache")
LENGTH, WINDOWS, SEED = 16, 3, 5


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_base(tmp_path)


@pytest.fixture
def task(tmp_path: Path, base: Path) -> Tokens:
    path = str(write(tmp_path / "text.txt"))
    valid = str(write(tmp_path / "valid.txt"))
    return Tokens(path=path, valid=valid, tokenizer=str(base), length=LENGTH)


@pytest.fixture
def model(base: Path) -> Transformer:
    found = load_model(base)
    assert isinstance(found, Transformer)
    found.set_context_(LENGTH)
    return found


def test_slopes_are_sums_of_weight_times_gradient(model: Transformer, task: Tokens) -> None:
    moments = one_shot_scores.calibrate(model, task, WINDOWS, SEED)
    wanted: dict[str, torch.Tensor] = {}
    for index in range(WINDOWS):
        model.zero_grad()
        inputs, targets = task.batch(1, Draw(SEED, index), "cpu")
        task.loss(model(inputs), targets).backward()
        for name, part in one_shot_scores.writers(model).items():
            leaf = "down" if part.axis.endswith("d_f") else "out"
            gradient = model.operators[name].get_parameter(leaf).grad
            assert gradient is not None
            slope = part.by_channel((part.matrix * gradient.view_as(part.matrix)).sum(1))
            wanted[name] = wanted.get(name, 0) + slope.square()
    for name, square in wanted.items():
        assert moments[name].windows == WINDOWS
        torch.testing.assert_close(moments[name].square, square, rtol=1e-4, atol=1e-10)


@pytest.mark.parametrize("weights", ["plain", "level"])
def test_what_others_compute_too_is_written_by_them(
    model: Transformer, task: Tokens, monkeypatch: pytest.MonkeyPatch, weights: str
) -> None:
    monkeypatch.setattr(one_shot_scores, "RIDGE", 1e-6)
    name, part = next((n, p) for n, p in model.operators.items() if isinstance(p, SwiGLU))
    with torch.no_grad():
        for matrix in (part.up, part.gate):
            matrix[:, 1] = matrix[:, 0]
    state = state_of(model)
    moments = one_shot_scores.calibrate(model, task, WINDOWS, SEED)
    keeps = all_kept(model)
    keeps[f"operators.{name}.d_f"][1] = False
    inputs, _ = task.batch(2, Draw(SEED), "cpu")

    def change_(found: Transformer, keeps: dict[str, torch.Tensor]) -> None:
        one_shot.compensate_(found, keeps, moments, weights)

    fitted = one_shot.smaller(model, state, keeps, change_)
    alone = one_shot.smaller(model, state, keeps, lambda found, keeps: None)
    assert fma_of(fitted) == fma_of(alone) < fma_of(model)
    with torch.no_grad():
        whole = model(inputs)
        off = (alone(inputs) - whole).abs().max()
        assert (fitted(inputs) - whole).abs().max() < 1e-2 * off


def test_all_rankings_reach_the_work_and_rows_are_kept(
    base: Path, task: Tokens, tmp_path: Path, model: Transformer
) -> None:
    out = tmp_path / "one_shot.json"
    words = [str(base), "--data", task.path, "--valid", task.valid, "--out", str(out)]
    words += ["--ratios", "1.05", "--length", str(LENGTH), "--calibration", "2", "--windows", "2"]
    one_shot.main(words)
    rows = json.loads(out.read_text())["rows"]
    assert [row["method"] for row in rows[:1]] == ["original"]
    assert len(rows) == 1 + 2 * len(one_shot_scores.RANKINGS)
    most = fma_of(model) / 1.05
    assert all(0.8 * most < row["fma"] <= most for row in rows[1:])
    assert len({row["bits_per_byte"] for row in rows}) > len(one_shot_scores.RANKINGS)
    one_shot.main(words)
    assert json.loads(out.read_text())["rows"] == rows
    one_shot.main([*words, "--rounds", "2", "--rankings", "fisher", "--compensated", "yes"])
    assert len(json.loads(out.read_text())["rows"]) == len(rows) + 1
