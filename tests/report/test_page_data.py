"""The data of the page's script: equal to the run's files, thinned out, valid JSON."""

import json
from pathlib import Path
from typing import Any

from gaugelasso.report.data import load_run
from gaugelasso.report.page_data import FRAMES, POINTS, page_data, thin_curve, to_script
from tests.report.folders import event, initial_widths, make_run


def widths_of(frames: dict[str, Any], axes: int) -> list[list[int]]:
    """Every structure in full, as the script restores it."""
    widths, found = [0] * axes, []
    for changes in frames["changes"]:
        widths = list(widths)
        for index, width in zip(changes[::2], changes[1::2], strict=True):
            widths[index] = width
        found.append(widths)
    return found


def test_frames_restore_the_structure_after_every_event(tmp_path: Path) -> None:
    run = load_run(make_run(tmp_path / "r"))
    data = page_data([run])
    frames = data["runs"][0]["frames"]
    assert frames["step"] == [0, 20, 40]  # the event of step 10 changed nothing
    names = list(run.initial["widths"])
    for step, widths in zip(frames["step"], widths_of(frames, len(names)), strict=True):
        expected = run.widths_at(step)
        assert widths == [expected.get(name, 0) for name in names]
    assert frames["parameters"] == [2000, 500, 500]
    assert frames["text"][2] == "dropped 10: attention_1.d_ai 8, D 2; removed attention_1"
    assert data["runs"][0]["final"]["fma"] == 100.0


def test_the_slider_begins_before_a_cut_at_step_0(tmp_path: Path) -> None:
    """As post-hoc pruning makes it: the full model is what the run began with."""
    narrow = initial_widths(2) | {"D": 4}
    cut = event(0, 1000.0, 500.0, {"D": 4}, [], narrow)
    frames = page_data([load_run(make_run(tmp_path / "r", events=[cut]))])["runs"][0]["frames"]
    assert (frames["step"], frames["fma"]) == ([0, 1], [1000.0, 500.0])


def test_two_structures_of_the_same_work_have_parameters_of_their_own(tmp_path: Path) -> None:
    """As an exchange makes them."""
    widths = initial_widths(2)
    first, second = widths | {"D": 6}, widths | {"D": 6, "embedding.d_e": 4}
    cut = event(20, 1000.0, 500.0, {"D": 2}, [], first)
    path = make_run(tmp_path / "r", events=[cut, event(40, 500.0, 500.0, {}, [], second)])
    log = path / "metrics.jsonl"
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    counts = {10: 2000, 20: 900, 30: 900}
    rows = [row | {"parameters": counts.get(row["step"], 880)} for row in rows]
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    frames = page_data([load_run(path)])["runs"][0]["frames"]
    assert frames["fma"] == [1000.0, 500.0, 500.0]
    assert frames["parameters"] == [2000, 900, 880]


def test_parameters_that_no_row_has_are_those_before(tmp_path: Path) -> None:
    """Two events between two rows of the log."""
    cuts = [
        event(step, fma + 100.0, fma, {"D": 1}, [], initial_widths(2) | {"D": width})
        for step, fma, width in ((21, 900.0, 7), (24, 800.0, 6))
    ]
    frames = page_data([load_run(make_run(tmp_path / "r", events=cuts))])["runs"][0]["frames"]
    assert frames["step"] == [0, 21, 24]
    assert frames["parameters"] == [2000, 2000, 500]


def test_a_rollback_is_a_frame(tmp_path: Path) -> None:
    narrow = initial_widths(2) | {"D": 4}
    back = event(30, 500.0, 1000.0, {}, [], initial_widths(2)) | {"returned_to": 10}
    run = load_run(
        make_run(tmp_path / "r", events=[event(20, 1000.0, 500.0, {"D": 4}, [], narrow), back])
    )
    frames = page_data([run])["runs"][0]["frames"]
    assert frames["fma"] == [1000.0, 500.0, 1000.0]
    assert frames["text"][2] == "rollback to the state of step 10"
    assert frames["back"] == [False, False, True]


def test_an_exchange_is_told_and_is_no_rollback(tmp_path: Path) -> None:
    swapped = initial_widths(2) | {"operators.mlp_0.d_f": 12, "operators.attention_0.d_v": 10}
    told = {"exchanged": {"operators.mlp_0.d_f": 4}, "grown": {"operators.attention_0.d_v": 2}}
    run = load_run(
        make_run(tmp_path / "r", events=[event(20, 1000.0, 1001.0, {}, [], swapped) | told])
    )
    frames = page_data([run])["runs"][0]["frames"]
    assert frames["text"][1] == "exchange took 4: mlp_0.d_f 4; grew 2: attention_0.d_v 2"
    assert frames["back"] == [False, False]


def test_of_many_events_the_last_is_kept_and_all_are_counted(tmp_path: Path) -> None:
    number = 3 * FRAMES + 7
    events = [
        event(i + 1, 2000.0 - i, 1999.0 - i, {"D": 1}, [], initial_widths(2) | {"D": number - i})
        for i in range(number)
    ]
    run = load_run(make_run(tmp_path / "r", events=events))
    data = page_data([run])
    frames = data["runs"][0]["frames"]
    assert data["thinned"]
    assert len(frames["step"]) == FRAMES + 1
    assert (frames["step"][-1], frames["fma"][-1]) == (number, events[-1]["fma"])
    assert sum(frames["events"]) == number


def test_a_long_curve_keeps_its_ends_and_its_spikes() -> None:
    steps = list(range(50_000))
    values = [1.0 + step / 50_000 for step in steps]
    values[12_345], values[33_333] = 99.0, -99.0
    thin_steps, thin_values = thin_curve((steps, values), POINTS)
    assert len(thin_steps) <= POINTS
    assert thin_steps == sorted(set(thin_steps))
    assert {0, 12_345, 33_333, 49_999} <= set(thin_steps)
    assert {99.0, -99.0} <= set(thin_values)
    short = ([1, 2, 3], [0.5, 0.25, 0.125])
    assert thin_curve(short, POINTS) == short


def test_the_page_of_a_long_run_stays_small(tmp_path: Path) -> None:
    """100,000 steps, a structural event every 50, a row every 10."""
    events = [
        event(50 * i, 1e6 - i, 1e6 - i - 1, {"D": 1}, [], initial_widths(12) | {"D": 2001 - i})
        for i in range(1, 2000)
    ]
    folder = make_run(tmp_path / "r", layers=12, events=events)
    row = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    rows = [row | {"step": 10 * (i + 1), "loss": 1 / (i + 3)} for i in range(10_000)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    assert len(to_script(page_data([load_run(folder)]))) < 150_000


def test_names_cannot_end_the_script_and_nan_is_null() -> None:
    text = to_script({"</script><b>&": [float("nan"), float("inf"), 1.5]})
    assert not set("<>&") & set(text)
    assert json.loads(text) == {"</script><b>&": [None, None, 1.5]}
