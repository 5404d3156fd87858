"""The benchmark of a large model, at a tiny size: its events must cut, or undo what they cut."""

import json
from pathlib import Path

import pytest
from benchmarks import large


def test_events_cut_and_the_last_one_undoes_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "large.json"
    words = ["--width", "64", "--layers", "2", "--vocabulary", "128", "--batch", "1"]
    words += ["--length", "8", "--repeats", "3", "--device", "cpu", "--out", str(out)]
    large.main(words)
    assert "ms a step, of which compression adds" in capsys.readouterr().out
    found = json.loads(out.read_text())
    *cuts, undone = found["bytes"]["events"]
    assert len(cuts) == large.CUTS
    before = found["step"]["fma"]
    for event in cuts:
        assert event["fma_before"] == before
        # About the share that an event of a run by harm cuts.
        assert 0.9 * before < event["fma"] < 0.985 * before
        assert event["indices"] >= event["axes"] > 0
        assert event["undone"] == []
        before = event["fma"]
    assert undone["fma"] == undone["fma_before"] == before
    assert undone["undone"] == ["cut"]
    assert found["step"]["fma_after_events"] < found["step"]["fma"]
