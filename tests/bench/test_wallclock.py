"""The figure of step times: thin curves of finished runs, and a picture from them alone."""

import json
import math
from pathlib import Path

import pytest
from benchmarks import wallclock
from benchmarks.table_sources import check_curves
from benchmarks.wallclock import MOST, main, read_file, thinned

from gaugelasso.config import Config
from gaugelasso.training.trainer import Trainer

MODEL = {"width": 8, "layers": 1, "heads": 2, "d_k": 4, "d_v": 4, "d_f": 8, "positions": True}
# In the order of the paper's figure.
TASKS = {
    "ff31": {"modulus": 5},
    "charlm": {},
    "mae": {"size": 12, "patch": 4},
    "retrieval": {"vocabulary": 16, "modulus": 3, "length": 8},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny finished run of each task."""
    root = tmp_path_factory.mktemp("wallclock")
    text = root / "a.txt"
    text.write_text("the cat sat on the mat. " * 200)
    texts = {"path": str(text), "split": 0.5, "length": 16}
    for name, keys in TASKS.items():
        sections = {
            "task": {"name": name, **keys, **(texts if name == "charlm" else {})},
            "model": MODEL | {"rope": False},
            "target": {"loss": 9.0, "hold": "pressed"},
            "train": {"steps": 12, "warmup": 2, "cooldown": 4, "batch": 2, "log_every": 2}
            | {"final_batches": 1, "device": "cpu", "seed": 3},
        }
        Trainer(Config.from_dict(sections), root / name).run()
    return root


def test_four_tasks_in_one_picture(runs: Path, tmp_path: Path) -> None:
    data, picture = tmp_path / "new" / "wallclock.json", tmp_path / "wallclock.png"
    folders = [str(runs / name) for name in TASKS]
    main([*folders, "--data", str(data), "--picture", str(picture)])
    curves = read_file(data)["curves"]
    assert [each["task"] for each in curves] == list(TASKS)
    for each in curves:
        log = (runs / each["task"] / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in log]
        assert each["step"] == [row["step"] for row in rows] == [2, 4, 6, 8, 10, 12]
        assert each["step_ms"] == pytest.approx([row["step_ms"] for row in rows], rel=1e-3)
        assert each["loss"] == pytest.approx([row["loss"] for row in rows], rel=1e-3)
        assert (each["cooldown"], each["target"], each["seed"]) == (8, 9.0, 3)
        assert each["hardware"].startswith("CPU")
    assert str(runs) not in json.dumps(curves)
    # `make tables` reads the same file.
    check_curves(data, json.loads(data.read_text()))
    # The file alone gives the same picture.
    again = tmp_path / "again.png"
    main(["--data", str(data), "--picture", str(again)])
    assert again.read_bytes() == picture.read_bytes()
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_curves_of_other_tasks_stay(runs: Path, tmp_path: Path) -> None:
    data = tmp_path / "wallclock.json"
    for name in ("retrieval", "mae", "retrieval"):
        main([str(runs / name), "--data", str(data)])
        data.write_text(json.dumps(json.loads(data.read_text()) | {"note": "alone"}))
    assert [each["task"] for each in read_file(data)["curves"]] == ["mae", "retrieval"]
    found = json.loads(data.read_text())
    assert found["hardware"].startswith("CPU")
    assert found["note"] == "alone"


def test_a_long_log_is_thinned() -> None:
    rows = [{"step": n, "step_ms": 900.0 if n % 3 == 0 else 2.0, "loss": n} for n in range(1, 1002)]
    curve = thinned(rows)
    # Six rows a point.
    assert len(curve["step"]) == 167 <= MOST
    assert curve["step"][:2] == [6, 12]
    assert curve["step"][-1] == 1001
    assert set(curve["step_ms"]) == {2.0}
    assert curve["loss"][0] == 3.5


def test_a_loss_that_is_not_finite_is_a_gap(tmp_path: Path) -> None:
    rows = [{"step": n, "step_ms": 2.0, "loss": math.nan if n < 3 else 1.0} for n in (1, 2, 3, 4)]
    curve = thinned(rows)
    assert curve["loss"] == [None, None, 1.0, 1.0]
    about = {"task": "x", "seed": 1, "target": None, "cooldown": None}
    wallclock.draw([about | curve], tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_bad_input_is_named_and_writes_nothing(
    runs: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "other.json").write_text('{"runs": []}')
    (tmp_path / "half.json").write_text('{"curves": [{"task": "x"}]}')
    one, data, picture = str(runs / "mae"), "new.json", "new.png"
    for words, message in (
        ([one, one, "--data", data], "two runs are of task 'mae'"),
        ([one, "empty", "--data", data], "'empty' is not a finished run: summary.json is missing"),
        (["--data", data, "--picture", picture], "'new.json'"),
        (["--data", "other.json", "--picture", picture], "'other.json' has no 'curves'"),
        (["--data", "half.json", "--picture", picture], "curves[0] of 'half.json': key 'seed'"),
        (["--data", data], "nothing to do"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 2
        assert message in capsys.readouterr().err
    assert not Path(data).exists()
    assert not Path(picture).exists()
