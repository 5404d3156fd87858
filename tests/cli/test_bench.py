"""The command `bench`."""

import json
from pathlib import Path

import pytest

from gaugelasso.report import timing
from gaugelasso.runs.reading import SERVING
from tests.command import Command, assert_user_error


def test_bench_times_a_step_and_a_run(
    gaugelasso: Command, config: Path, run: Path, tmp_path: Path
) -> None:
    file = tmp_path / "bench.json"
    for what in ((config, "--work", "tiny"), (run, "--inference", "--work", "mine")):
        options = ("--repeats", "3", "--device", "cpu", "--out", file)
        code, out, err = gaugelasso("bench", *what, *options)
        assert code == 0, err
        assert f"benchmark file: {file}" in out
    kept = json.loads(file.read_text())
    assert [row["work"] for row in kept["rows"]] == ["tiny"]
    models = ["ancestor", "uniform", "compressed"]
    names = [f"mine-{model}{form}-cpu" for model in models for form in ("", "-served")]
    assert [row["work"] for row in kept["inference"]] == names
    # In the run folder too, where its reports find them.
    own = json.loads((run / SERVING).read_text())["inference"]
    assert [row["work"] for row in own] == [name.removeprefix("mine-") for name in names]
    code, out, _ = gaugelasso("info", run)
    assert (code, " ".join(out.split()).count("measured ms")) == (0, 2)
    sizes = ("--batch", "2", "--length", "5", "--decode", "--work", "mine")
    code, out, err = gaugelasso("bench", run, "--inference", *sizes, *options)
    assert code == 0, err
    assert "one more token of 2 sequences after 4" in out
    assert len(json.loads((run / SERVING).read_text())["inference"]) == len(names) + 3
    added = [row["work"] for row in json.loads(file.read_text())["inference"][len(names) :]]
    assert added == [f"mine-2x5-decode-{model}-served-cpu" for model in models]


def test_a_run_folder_that_cannot_be_written_is_measured_all_the_same(
    gaugelasso: Command, run: Path, tmp_path: Path
) -> None:
    (run / SERVING).mkdir()
    file = tmp_path / "bench.json"
    options = ("--batch", "1", "--repeats", "3", "--device", "cpu", "--out", file)
    code, out, err = gaugelasso("bench", run, "--inference", *options)
    assert code == 0, err
    assert out.count("warning: reports of the run will not show these times") == 1
    assert len(json.loads(file.read_text())["inference"]) == 6


def test_times_of_a_run_are_written_to_its_folder_alone(
    gaugelasso: Command, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    options = ("--batch", "1", "--repeats", "3", "--device", "cpu")
    code, out, err = gaugelasso("bench", run, "--inference", *options)
    assert code == 0, err
    assert f"in reports of the run: {run / SERVING}" in out
    assert len(json.loads((run / SERVING).read_text())["inference"]) == 6
    assert not [*here.iterdir()]


def test_bench_rounds_widths_up(
    gaugelasso: Command, config: Path, run: Path, tmp_path: Path
) -> None:
    file = tmp_path / "bench.json"
    options = ("--multiple", "3", "--repeats", "3", "--device", "cpu", "--out", file)
    for structure in ((), ("--structure", run)):
        code, _, err = gaugelasso("bench", config, *structure, *options)
        assert code == 0, err
    rows = json.loads(file.read_text())["rows"]
    assert [row["work"] for row in rows] == ["tiny-by3", "tiny-structure-by3"]
    assert all(row["multiple"] == 3 and row["fma"] > row["fma_exact"] for row in rows)


@pytest.mark.parametrize(("limit", "warns"), [(-1.0, True), (1e9, False)])
def test_bench_warns_of_a_busy_machine(
    gaugelasso: Command,
    config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    limit: float,
    warns: bool,
) -> None:
    monkeypatch.setattr(timing, "BUSY", limit)
    options = ("--repeats", "3", "--device", "cpu", "--out", tmp_path / "bench.json")
    code, out, err = gaugelasso("bench", config, *options)
    assert code == 0, err
    warnings = [line for line in out.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == warns
    assert all("repetitions disagree" in line and "Run it again" in line for line in warnings)


def test_inference_needs_a_run_folder(gaugelasso: Command, config: Path) -> None:
    answer = gaugelasso("bench", config, "--inference")
    assert_user_error(answer, "--inference needs a run folder")


@pytest.mark.parametrize("option", [("--batch", "2"), ("--length", "5"), ("--decode",)])
def test_sizes_are_for_inference(
    gaugelasso: Command, config: Path, option: tuple[str, ...]
) -> None:
    answer = gaugelasso("bench", config, *option)
    assert_user_error(answer, "--batch, --length and --decode are for --inference")


def test_a_run_folder_needs_inference(gaugelasso: Command, run: Path) -> None:
    assert_user_error(gaugelasso("bench", run), f"{str(run)!r} is a folder: add --inference")


def test_inference_needs_a_finished_run(gaugelasso: Command, run: Path, tmp_path: Path) -> None:
    (run / "summary.json").unlink()
    out = tmp_path / "bench.json"
    answer = gaugelasso("bench", run, "--inference", "--out", out)
    assert_user_error(answer, f"{str(run)!r} is not finished: summary.json is missing; finish it")
    assert not out.exists()


def test_a_multiple_is_at_least_one(gaugelasso: Command, config: Path) -> None:
    code, _, err = gaugelasso("bench", config, "--multiple", "0")
    assert code == 2
    assert "--multiple" in err


@pytest.mark.parametrize(
    "option", [("--set", "train.seed=1"), ("--structure", "x.json"), ("--multiple", "8")]
)
def test_inference_refuses_options_it_does_not_use(
    gaugelasso: Command, run: Path, option: tuple[str, str]
) -> None:
    answer = gaugelasso("bench", run, "--inference", *option)
    assert_user_error(answer, "--inference takes structure and settings from RUN")


@pytest.mark.parametrize("text", ["[]", '{"inference": [{}]}', '{"inference": 3}'])
def test_a_file_of_something_else_is_refused_before_the_measurement(
    gaugelasso: Command, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr("gaugelasso.cli.benchmarks.bench_run", None)
    out = tmp_path / "other.json"
    out.write_text(text)
    answer = gaugelasso("bench", run, "--inference", "--out", out)
    assert_user_error(answer, f"{str(out)!r} is no benchmark file")
    assert out.read_text() == text
