"""The stand-in of a pretrained model: each way to make channels go ends in a row."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks import stand_in
from benchmarks.stand_in_ways import fresh_gauge_

from gaugelasso.models import Transformer


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with texts, and a stand-in that has hardly been trained."""
    folder = tmp_path_factory.mktemp("stand-in")
    train = b"a small model learns from a small text. " * 100
    (folder / "train.txt").write_bytes(train)
    (folder / "valid.txt").write_bytes(train[:1600])
    stand_in.main(["train", *arguments(folder), "--held-back", "1000", "--steps", "20"])
    return folder


def arguments(folder: Path) -> list[str]:
    """The stand-in, and the texts."""
    data, valid = str(folder / "train.txt"), str(folder / "valid.txt")
    return [str(folder / "base.pt"), "--data", data, "--valid", valid]


@pytest.mark.parametrize("method", ["harm", "proximal", "gates", "vectors"])
def test_a_run_ends_in_a_row(texts: Path, tmp_path: Path, method: str) -> None:
    results = tmp_path / "rows.json"
    words = [*arguments(texts), "--text", "1000", "--method", method, "--ratio", "1.1"]
    words += ["--steps", "30", "--windows", "8", "--results", str(results)]
    stand_in.main(["compress", *words])
    (row,) = json.loads(results.read_text())["rows"]
    assert row["method"] == method
    # So few steps are enough for harm alone.
    assert row["fma"] <= row["fma_original"] / (1.1 if method == "harm" else 1.0)
    assert np.isfinite([row["loss"], row["training_loss"], row["standard_error"]]).all()


def test_the_gauge_of_a_fresh_model_changes_no_output() -> None:
    model, fresh = Transformer(stand_in.SPEC, 1), Transformer(stand_in.SPEC, 2)
    for name, parameter in model.named_parameters():
        parameter.data.mul_(3.0 if "scale" in name else 0.5)
    text = np.frombuffer(bytes(range(256)) * 4, np.uint8)
    before = stand_in.window_losses(model, text, 8)
    fresh_gauge_(model, fresh)
    after = stand_in.window_losses(model, text, 8)
    np.testing.assert_allclose(after, before, rtol=1e-4)
    with torch.no_grad():
        gain, wanted = (each.classifier.read.gain.square().mean() for each in (model, fresh))
    assert float(gain) == pytest.approx(float(wanted), rel=0.05)
