"""The tables: the right figure in the right cell, and text that is escaped."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gaugelasso.errors import UserError
from gaugelasso.report import formats, write_report
from gaugelasso.report.data import load_run
from gaugelasso.report.event_table import events_table, exchange_table
from gaugelasso.report.formats import DASH
from gaugelasso.report.layout import Table, render, to_html, to_markdown
from gaugelasso.report.tables import (
    before_after,
    next_table,
    print_outcome,
    print_structure,
    run_tables,
    runs_table,
    structure_table,
)
from gaugelasso.report.verdict import headline, verdict
from gaugelasso.runs.training_work import BEGUN
from tests.report.folders import NEXT, event, initial_widths, make_run


def test_before_and_after_of_one_run(tmp_path: Path) -> None:
    rows = {row[0]: row[1:] for row in before_after([load_run(make_run(tmp_path / "r"))]).rows}
    assert rows["FMA per token (accounting: fma)"] == ["1,000", "100", "10.0×"]
    assert rows["parameters"] == ["2,000", "500", "4.00×"]
    assert rows["residual sites D"] == ["8", "6", "1.33×"]
    assert rows["operators"] == ["4", "3", "1.33×"]
    assert rows["held-out loss"] == ["—", "0.03", "target 0.05"]
    assert rows["accuracy"] == ["—", "99.96%", ""]
    assert rows["step time"] == ["—", "5.00 ms", "—"]  # the structure changed after one row
    assert rows["training work (FMA per token, all steps)"] == ["100k", "40k", "2.50×"]
    assert rows["first batch within the loss target, step"][1] == "15"
    assert rows["wall time"][1] == "12.5 s"


def test_before_and_after_of_seeds_and_of_an_unfinished_run(tmp_path: Path) -> None:
    runs = [load_run(make_run(tmp_path / f"r{seed}", seed=seed)) for seed in (0, 100)]
    rows = {row[0]: row[1:] for row in before_after(runs).rows}
    assert rows["FMA per token (accounting: fma)"] == ["1,000", "150 ± 70.7", "7.50× ± 3.54×"]
    unfinished = load_run(make_run(tmp_path / "unfinished", rows=0, events=[], finished=False))
    rows = {row[0]: row[1:] for row in before_after([unfinished]).rows}
    assert rows["training loss"][1] == "—"
    assert rows["step time"] == ["—", "—", "—"]


def test_training_of_the_full_model_stands_beside_a_rival_s_own(tmp_path: Path) -> None:
    """The initial model for the rival's steps is compared with these steps alone."""
    run = load_run(make_run(tmp_path / "run", method="post-hoc"))
    work = {"own": 40_000.0, "before": 500_000.0, "total": 540_000.0, "needs": BEGUN}
    source = {"training_fma": 500_000.0, "wall_s": 10.0}
    summary = {**(run.summary or {}), "training_fma": 540_000.0, "source": source}
    rival = replace(run, summary={**summary, "training_work": work})
    # Early versions did not write the parts, but they follow.
    for one in (rival, replace(run, summary=summary)):
        rows = {row[0]: row[1:] for row in before_after([one]).rows}
        assert rows["training work (FMA per token, all steps)"] == ["100k", "40k", "2.50×"]
        assert rows[f"training work in all, with {BEGUN}"] == [DASH, "540k", ""]
        assert rows["wall time"][1] == "2.5 s"
        assert rows[f"wall time in all, with {BEGUN}"][1] == "12.5 s"
    assert not any("in all" in row[0] for row in before_after([run]).rows)
    unknown = replace(run, summary={**summary, "source": {"training_fma": None}})
    rows = {row[0]: row[1:] for row in before_after([unknown]).rows}
    assert rows["training work (FMA per token, all steps)"][1] == DASH
    assert rows["wall time"][1] == DASH


ORIGINAL = {"test": {"loss": 0.025, "bits": 0.75}, "metric": "bits per byte"}


@pytest.mark.parametrize("place", ["run", "."])
def test_figures_of_the_original_stand_before(place: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"model": {"from": "base"}}
    folder = make_run(tmp_path / "run", metric="bits per byte", changes=changes)
    (tmp_path / place / "original.json").write_text(json.dumps(ORIGINAL))
    rows = {row[0]: row[1:] for row in before_after([load_run(folder)]).rows}
    assert rows["held-out loss"] == ["0.025", "0.03", "target 0.05"]
    assert rows["bits per byte"][:2] == ["0.75", "0.9996"]
    # The figure of another metric, or beside a training loss, would mislead.
    other = replace(load_run(folder), original={**ORIGINAL, "metric": "accuracy"})
    assert {row[0]: row[1] for row in before_after([other]).rows}["bits per byte"] == DASH
    going_on = replace(load_run(folder), summary=None)
    assert {row[0]: row[1] for row in before_after([going_on]).rows}["training loss"] == DASH


def test_a_file_beside_a_run_of_fresh_weights_is_not_read(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    (tmp_path / "original.json").write_text("not JSON")
    assert load_run(folder).original is None
    given = make_run(tmp_path / "given", changes={"model": {"from": "base"}})
    with pytest.raises(UserError, match=r"original\.json': not a readable JSON file"):
        load_run(given)


def test_an_unchanged_model_has_no_ratio_of_step_times(tmp_path: Path) -> None:
    still = load_run(make_run(tmp_path / "r", events=[]))
    times = [9.0] * 5 + [3.0] * 5  # another process ended
    rows = [{**row, "step_ms": time} for row, time in zip(still.metrics, times, strict=True)]
    table = before_after([replace(still, metrics=tuple(rows))])
    assert ["step time", "6.00 ms", "3.00 ms", "—"] in table.rows
    assert ["FMA per token (accounting: fma)", "1,000", "1,000", "1.00×"] in table.rows


def test_structure_table(tmp_path: Path) -> None:
    table = structure_table(load_run(make_run(tmp_path / "r")))
    assert table.headers == ["layer", "d_ai", "H", "d_k", "d_v", "d_ao", "d_mi", "d_f", "d_mo"]
    assert table.rows == [
        ["0", "8", "4/2", "4", "8", "8", "8", "4", "8"],
        ["1", "—", "—", "—", "—", "—", "8", "16", "8"],
        ["initial", "8", "4/2", "4", "8", "8", "8", "16", "8"],
    ]
    assert "D 6 of 8" in table.note


def test_channels_next_to_be_removed(tmp_path: Path) -> None:
    table = next_table(load_run(make_run(tmp_path / "r", next_to_go=NEXT)))
    assert table is not None
    assert table.rows == [["mlp_0.d_f", "3", "24", "0.01235"], ["D", "5", "1,066", "0.5"]]
    assert "least utility for their price" in table.note


def test_a_run_without_a_list_of_next_channels(tmp_path: Path) -> None:
    unfinished = make_run(tmp_path / "unfinished", finished=False)
    empty = make_run(tmp_path / "empty", next_to_go=[])
    for folder in (make_run(tmp_path / "old"), empty, unfinished):
        assert [table.title for table in run_tables(load_run(folder))] == ["Structure, seed 0"]


def test_runs_table_ends_with_mean_and_std(tmp_path: Path) -> None:
    runs = [load_run(make_run(tmp_path / f"r{seed}", seed=seed)) for seed in (0, 10, 20)]
    table = runs_table(runs)
    fma = table.headers.index("FMA")
    assert [row[0] for row in table.rows] == ["0", "10", "20", "mean", "std"]
    assert [row[fma] for row in table.rows] == ["100", "110", "120", "110", "10"]


def test_events_are_sorted_by_the_work_they_saved(tmp_path: Path) -> None:
    table = events_table([load_run(make_run(tmp_path / "r"))])
    assert [row[0] for row in table.rows] == ["40", "20"]  # step 10 dropped nothing
    largest = dict(zip(table.headers, table.rows[0], strict=True))
    assert (largest["FMA saved"], largest["share"]) == ("500", "83.3%")
    assert (largest["loss before"], largest["after cut"]) == ("0.04", "0.0625")
    assert largest["channels dropped"] == "10: attention_1.d_ai 8, D 2"
    assert largest["operators removed"] == "attention_1"
    assert table.note.startswith("3 events, 2 with a drop, 0 refused")


def test_undone_changes_are_counted(tmp_path: Path) -> None:
    widths, events = initial_widths(2), []
    for step, undone in enumerate([{"balance": 0.5}, {}, {"balance": 0.5, "cut": 0.7}], 1):
        events.append(event(step, 1000.0, 1000.0, {}, [], widths) | {"undone": undone})
    note = events_table([load_run(make_run(tmp_path / "r", events=events))]).note
    assert note.startswith("3 events, 0 with a drop, 0 refused, 2 with the balance undone, 1 with")


@pytest.mark.usefixtures("undrawn")
def test_exchanges_stand_beside_drops(tmp_path: Path) -> None:
    widths = initial_widths(2)
    swap = {"exchanged": {"operators.mlp_0.d_f": 3, "D": 1}, "grown": {"operators.mlp_1.d_f": 4}}
    events = [
        event(10, 1000.0, 900.0, {"D": 1}, [], widths),
        event(20, 900.0, 899.0, {}, [], widths) | swap,
        event(30, 899.0, 899.0, {}, [], widths) | {"undone": {"exchange": 0.9}},
    ]
    run = load_run(make_run(tmp_path / "r", events=events))
    note = events_table([run]).note
    assert note.startswith(
        "3 events, 1 with a drop, 0 refused, 1 with an exchange, 1 with the exch"
    )
    table = exchange_table([run])
    assert table is not None
    assert table.rows == [["20", "899", "4: mlp_0.d_f 3, D 1", "4: mlp_1.d_f 4"]]
    assert "mlp_1.d_f 4" in write_report([tmp_path / "r"]).tables.read_text()
    assert exchange_table([load_run(make_run(tmp_path / "plain"))]) is None


def test_only_the_largest_events_are_shown(tmp_path: Path) -> None:
    widths = initial_widths(2)
    many = [event(s, 1000.0 - s, 999.0 - 2 * s, {"D": 1}, [], widths) for s in range(1, 31)]
    table = events_table([load_run(make_run(tmp_path / "r", events=many))], most=3)
    assert [row[0] for row in table.rows] == ["30", "29", "28"]
    saved = table.headers.index("FMA saved")
    assert [row[saved] for row in table.rows] == ["31", "30", "29"]


def test_axes_that_are_not_named_are_counted(tmp_path: Path) -> None:
    for more, text in ((1, "1 more axis"), (2, "2 more axes")):
        dropped = {f"operators.mlp_0.x{k}": 1 for k in range(3 + more)}
        drops = [event(20, 1000.0, 900.0, dropped, [], initial_widths(2))]
        table = events_table([load_run(make_run(tmp_path / f"r{more}", events=drops))])
        assert table.rows[0][-2].endswith(f", mlp_0.x2 1, {text}")


def test_operators_that_are_not_named_are_counted(tmp_path: Path) -> None:
    for more, text in ((1, "1 more operator"), (2, "2 more operators")):
        removed = [f"operators.mlp_{k}" for k in range(3 + more)]
        drops = [event(20, 1000.0, 900.0, {"D": 1}, removed, initial_widths(2))]
        table = events_table([load_run(make_run(tmp_path / f"r{more}", events=drops))])
        assert table.rows[0][-1] == f"mlp_0, mlp_1, mlp_2, {text}"


@pytest.mark.parametrize(
    ("loss", "held", "sentence"),
    [
        (0.03, True, "Held-out loss 0.03, within the loss target of 0.05."),
        (0.5, False, "Held-out loss 0.5, above the loss target of 0.05."),
    ],
)
def test_verdict_tells_whether_the_target_was_met(
    tmp_path: Path, loss: float, held: bool, sentence: str
) -> None:
    run = load_run(make_run(tmp_path / "r", loss=loss))
    assert verdict([run]) == (held, sentence)


def test_headlines(tmp_path: Path) -> None:
    run = load_run(make_run(tmp_path / "a"))
    assert headline([run]) == ("1,000 → 100 FMA per token: 10.0× smaller at 99.96% accuracy")
    runs = [run, load_run(make_run(tmp_path / "b", seed=100, loss=0.5))]
    assert headline(runs).endswith("(means of 2 seeds)")
    assert verdict(runs)[1].startswith("1 of 2 seeds end within the loss target")
    unfinished = load_run(make_run(tmp_path / "c", rows=3, events=[], finished=False))
    assert headline([unfinished]) == ("1,000 → 1,000 FMA per token: not smaller at 58.00% accuracy")
    # Milliseconds are time, and estimates; bytes are a size.
    for accounting, gain in (("latency", "ms: 10.0× faster by the table at"),
                             ("bytes", "bytes: 10.0× smaller at")):  # fmt: skip
        folder = tmp_path / accounting
        priced = load_run(make_run(folder, changes={"compress": {"accounting": accounting}}))
        assert gain in headline([priced])
    assert verdict([unfinished]) == (None, "Not finished: step 30 of at most 100.")


def test_printed_forms_escape_text() -> None:
    table = Table("<t>", ["a|b", "n"], [["[red]x[/red] | <i>", "1"]], note="<script>")
    console = Console(file=io.StringIO(), width=60)
    render(table, console)
    assert "[red]x[/red]" in console.file.getvalue()  # type: ignore[attr-defined]
    assert r"| [red]x[/red] \| &lt;i&gt; | 1 |" in to_markdown(table)
    page = to_html(table)
    assert "<script>" not in page
    assert "&lt;script&gt;" in page


def test_what_the_command_line_prints(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=100)
    run = load_run(make_run(tmp_path / "r"))
    print_structure(run, console)
    print_outcome(run, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "initial" in text
    assert "10.0× smaller at 99.96% accuracy" in text


@pytest.mark.parametrize(
    ("value", "text"), [(12.5, "12.5 s"), (287.7, "4 min 48 s"), (7500.0, "2 h 05 min")]
)
def test_times_are_formatted(value: float, text: str) -> None:
    assert formats.seconds(value) == text


def test_costs_stand_beside_each_other(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", changes={"compress": {"accounting": "latency"}})
    for name, share in (("initial.json", 1), ("summary.json", 4)):
        data = json.loads((run / name).read_text())
        data["costs"] = {"fma": 800 / share, "bytes": 4000 / share, "ms": 2 / share}
        data["costs"] |= {"bytes_of": "weights in float32", "ms_of": "estimated, 1×6 tokens"}
        (run / name).write_text(json.dumps(data))
    rows = {row[0]: row[1:] for row in before_after([load_run(run)]).rows}
    assert rows["ms (accounting: latency; estimated, 1×6 tokens)"] == ["1000", "100", "10.0×"]
    assert rows["FMA per token"] == ["800", "200", "4.00×"]
    assert rows["bytes (weights in float32)"] == ["4,000", "1,000", "4.00×"]
    assert "ms (estimated, 1×6 tokens)" not in rows  # it is the accounting itself
    headers = runs_table([load_run(run)]).headers
    assert headers[2:6] == ["ms", "compression", "fma", "bytes"]
