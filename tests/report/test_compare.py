"""Methods side by side: who is compared with whom, the figures, and what is refused."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from gaugelasso.errors import UserError
from gaugelasso.report import compare_figure, write_methods
from gaugelasso.report.comparable import load_runs
from gaugelasso.report.compare import Comparison, compare, compare_table
from gaugelasso.report.compare_figure import draw_comparison
from gaugelasso.report.compare_results import compare_results
from tests.report.folders import event, initial_widths, make_run


def run_at(path: Path, fma: float, loss: float, **options: Any) -> Path:
    drops = [event(40, 1000.0, fma, {"D": 1}, [], initial_widths(2))]
    return make_run(path, events=drops, loss=loss, **options)


def two_methods(root: Path, seeds: int = 4) -> Path:
    """Ours: less work than post-hoc at every seed; losses as good."""
    for seed in range(seeds):
        run_at(root / "ours" / f"s{seed}", 100 + seed, 0.03 + 0.001 * seed, seed=seed)
        posthoc = root / "posthoc" / f"s{seed}"
        run_at(posthoc, 200 + seed, 0.03 + 0.001 * seed, seed=seed, method="post-hoc")
    return root


def compared(*paths: Path, **options: Any) -> Comparison:
    return compare(load_runs(paths), **options)


# --- figures -----------------------------------------------------------------------------


def test_a_method_has_means_spread_seeds_and_p(tmp_path: Path) -> None:
    found = compared(two_methods(tmp_path))
    assert [*found.methods] == ["compression", "post-hoc"]
    table = compare_table(found)
    assert table.headers[:7] == [
        "method", "seed", "FMA per token", "held-out loss", "accuracy", "total training work",
        "target",
    ]  # fmt: skip
    ours, posthoc = (row for row in table.rows if row[0])
    assert ours == [
        "compression", "4 seeds", "101.5 ± 1.3", "0.0315 ± 0.001291", "99.960%", "40k",
        "4 of 4 held (loss)", "—", "—", "—",
    ]  # fmt: skip
    assert posthoc[-3:] == ["0.02857", "1", "1"]  # of FMA; losses and metrics are equal
    assert table.rows[1][:4] == ["", "0", "100", "0.03"]
    assert len(table.rows) == 2 * (1 + 4)
    assert "against compression, two-sided permutation test" in table.note


def test_the_results_file_has_every_run_and_every_method(tmp_path: Path) -> None:
    data = compare_results(compared(two_methods(tmp_path)))
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    first = data["runs"][0]
    expected = {"method": "compression", "seed": 0, "fma_final": 100.0, "loss": 0.03,
                "metric": 0.9996, "training_fma": 40_000.0, "wall_s": 12.5, "ms": None}  # fmt: skip
    assert first.items() >= expected.items()
    posthoc = data["methods"][1]
    assert posthoc["fma"] == {"mean": 201.5, "std": pytest.approx(1.291, abs=1e-3),
                              "min": 200.0, "max": 203.0}  # fmt: skip
    assert posthoc["p"] == {"loss": 1.0, "metric": 1.0, "fma": pytest.approx(2 / 70), "ms": None}


def change_summary(run: Path, **changes: Any) -> Path:
    path = run / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return run


def test_methods_that_began_with_other_kinds_of_models_stay_apart(tmp_path: Path) -> None:
    """Of a plain model its steps count too; runs of early versions do not name their method."""
    sources = [
        {"method": "plain", "steps": 100}, {"method": "plain", "steps": 100},
        {"method": "plain", "steps": 200}, {"method": "compression", "steps": 90},
        {"method": None, "steps": 95}, {"method": "cofi", "steps": 90},
    ]  # fmt: skip
    for seed, source in enumerate(sources):
        run = run_at(tmp_path / str(seed), 200, 0.03, seed=seed, method="post-hoc")
        change_summary(run, source={**source, "training_fma": 30_000.0})
    found = compared(tmp_path)
    assert {name: [one.run.seed for one in members] for name, members in found.methods.items()} == {
        "post-hoc (source.method = plain, source.steps = 100)": [0, 1],
        "post-hoc (source.method = plain, source.steps = 200)": [2],
        "post-hoc (source.method = compression)": [3, 4],
        "post-hoc (source.method = cofi)": [5],
    }
    conditions = {
        method["method"]: method["conditions"] for method in compare_results(found)["methods"]
    }
    assert conditions["post-hoc (source.method = cofi)"]["source.steps"] is None


def test_training_work_includes_the_runs_that_a_method_needs(tmp_path: Path) -> None:
    """A rival of an early version, too: its figure includes the full model."""
    work = {"own": 40_000.0, "before": 60_000.0, "total": 100_000.0, "needs": "the full model"}
    reference = {"named": "1.1 times the loss of the full model", "training_fma": 20_000.0}
    figures: dict[str, dict[str, Any]] = {
        "ours": {},
        "near": {"method": "near", "reference": reference},
        "cofi": {"method": "cofi", "source": {"training_fma": 60_000.0}, "training_work": work},
        "early": {"method": "post-hoc", "source": {"training_fma": 30_000.0}},
        "found": {"method": "from scratch"},
        "broken": {"method": "broken", "training_fma": None},
    }
    for name, changes in figures.items():
        change_summary(run_at(tmp_path / name, 100, 0.03), **changes)
    found = compared(tmp_path)
    table = compare_table(found)
    place = table.headers.index("total training work")
    assert {row[0]: row[place] for row in table.rows if row[0]} == {
        "compression": "40k", "near": "60k", "cofi": "100k", "post-hoc": "40k",
        "from scratch": "—", "broken": "—",
    }  # fmt: skip
    assert "of a run and of the runs that it needs" in table.note
    runs = {run["method"]: run for run in compare_results(found)["runs"]}
    assert {name: run["training_fma"] for name, run in runs.items()} == {
        "compression": 40_000.0, "near": 60_000.0, "cofi": 100_000.0, "post-hoc": 40_000.0,
        "from scratch": None, "broken": None,
    }  # fmt: skip
    assert runs["cofi"]["training_work"] == work
    assert runs["post-hoc"]["training_work"] == {
        "own": 10_000.0, "before": 30_000.0, "total": 40_000.0,
        "needs": "the run that it began with",
    }  # fmt: skip
    assert runs["from scratch"]["training_work"]["own"] == 40_000.0


def test_settings_name_the_conditions_of_one_method(tmp_path: Path) -> None:
    for name, loss in (("tight", 0.01), ("loose", 0.1)):
        run_at(tmp_path / name, 100, 0.03, changes={"target": {"loss": loss}})
    found = compared(tmp_path)
    assert {*found.methods} == {
        "compression (target.loss = 0.1)",
        "compression (target.loss = 0.01)",
    }
    assert found.against == next(iter(found.methods))


def test_the_first_compression_of_several_is_tested_against(tmp_path: Path) -> None:
    run_at(tmp_path / "a", 100, 0.03, method="post-hoc")
    for name, loss in (("b", 0.01), ("c", 0.1)):
        run_at(tmp_path / name, 100, 0.03, changes={"target": {"loss": loss}})
    assert compared(tmp_path).against == "compression (target.loss = 0.01)"


def test_a_missed_target_is_marked(tmp_path: Path) -> None:
    """In the table by run and by method, and in the legend of the picture."""
    for seed, loss in ((0, 0.03), (1, 0.2)):
        run_at(tmp_path / f"s{seed}", 100, loss, seed=seed)
    run_at(tmp_path / "plain", 100, 0.2, method="from scratch")
    found = compared(tmp_path)
    table = compare_table(found)
    place = table.headers.index("target")
    cells = [row[place] for row in table.rows]
    assert cells == ["—", "—", "1 of 2 held (loss)", "held (loss)", "missed (loss)"]
    assert found.missed("compression") == "1 of 2 missed"
    assert [run["held"] for run in compare_results(found)["runs"]] == [None, True, False]


def test_a_run_without_a_finite_loss_is_shown_and_not_averaged(tmp_path: Path) -> None:
    two_methods(tmp_path)
    path = tmp_path / "posthoc" / "s0" / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"loss": None}))
    found = compared(tmp_path)
    row = next(row for row in compare_table(found).rows if row[0] == "post-hoc")
    assert row[3] == "—"
    assert found.p_value("post-hoc", "loss") is None
    assert compare_results(found)["methods"][1]["loss"] is None
    draw_comparison(found, io.BytesIO())


def test_work_of_several_accountings_is_compared_in_fma(tmp_path: Path) -> None:
    one = run_at(tmp_path / "one", 100, 0.03)
    other = run_at(
        tmp_path / "b", 7, 0.03, method="x", changes={"compress": {"accounting": "bytes"}}
    )
    with pytest.raises(UserError, match=r"compress\.accounting is 'fma' in one and 'bytes'"):
        compared(one, other)
    for run, fma in ((one, 100.0), (other, 90.0)):
        for name in ("initial.json", "summary.json"):
            costs = {"costs": {"fma": fma, "bytes": 7.0, "ms": 0.5, "profile": "p"}}
            path = run / name
            path.write_text(json.dumps(json.loads(path.read_text()) | costs))
    change_summary(one, training_fma=2_000.0)
    paper = run_at(
        tmp_path / "p", 300, 0.03, method="y", changes={"compress": {"accounting": "paper"}}
    )
    for name in ("initial.json", "summary.json"):
        costs = {"costs": {"fma": 80.0, "bytes": 7.0, "ms": 0.5, "profile": "p"}}
        (paper / name).write_text(json.dumps(json.loads((paper / name).read_text()) | costs))
    found = compared(one, other, paper)
    assert [found.values(name, "fma") for name in found.methods] == [[100.0], [90.0], [80.0]]
    # Training work is FMA where the accounting counts no work, and the paper's where that counts.
    assert [found.training_work(run) for run in found.runs] == [2_000.0, 40_000.0, None]
    last = compare_results(found)["runs"][2]
    assert (last["training_fma"], last["training_work"]) == (None, None)
    # The milliseconds of the profile are shown, too.
    assert found.ms_of.startswith("ms")
    assert [found.values(name, "ms") for name in found.methods] == 3 * [[0.5]]


def test_the_picture_has_a_mark_for_every_seed_and_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sheets: list[Figure] = []
    monkeypatch.setattr(compare_figure, "save", lambda sheet, path: sheets.append(sheet))
    runs = load_runs([two_methods(tmp_path)])
    times = {run.path: 1.0 + run.seed for run in runs}
    latency = {"device": "cpu", "hardware": "x", "repeats": 3}
    runs[-1].summary["loss"] = 9.0  # type: ignore[index]
    draw_comparison(compare(runs, None, times, latency), tmp_path / "x.png")
    panels = sheets[0].axes
    assert len(panels) == 4  # loss and metric, against FMA and milliseconds
    marks = [tuple(line.get_xdata()) for line in panels[0].lines if line.get_alpha() == 0.5]
    assert marks == [(100, 101, 102, 103), (200, 201, 202)]
    empty = [line for line in panels[0].lines if line.get_markerfacecolor() == "white"]
    assert [tuple(line.get_xdata()) for line in empty if len(line.get_xdata())] == [(203,)]
    # A bar of one deviation would reach below zero, which a log axis does not show.
    (_, losses), runs_lost = panels[0].containers[1].lines[2], [0.03, 0.031, 0.032, 9.0]
    heights = [y for _, y in losses.get_segments()[0]]
    assert heights == pytest.approx([min(runs_lost), max(runs_lost)])
    below, above = panels[0].get_ylim()
    assert below < min(heights) < max(heights) < above
    keys = [text.get_text() for legend in sheets[0].legends for text in legend.get_texts()]
    assert keys[-3:] == [
        "one seed", "mean over seeds, bars from least to greatest", "missed its target",
    ]  # fmt: skip
    assert [bar.get_label() for bar in panels[1].containers] == [
        "compression", "post-hoc (1 of 4 missed)",
    ]  # fmt: skip
    assert sheets[0].axes[1].get_xlabel() == "ms, measured"


# --- what is refused ---------------------------------------------------------------------


def test_runs_of_other_tasks_and_data_are_refused(tmp_path: Path) -> None:
    ours = run_at(tmp_path / "ours", 100, 0.03)
    task = run_at(tmp_path / "task", 100, 0.03, task="lm")
    with pytest.raises(UserError, match=r"task\.name is 'retrieval' in one and 'lm'"):
        compared(ours, task)
    length = run_at(tmp_path / "length", 100, 0.03, changes={"task": {"length": 8}})
    with pytest.raises(UserError, match=r"task\.length is 16 in one and 8"):
        compared(ours, length)
    cached = run_at(tmp_path / "c", 100, 0.03, method="x", changes={"task": {"cache": "a"}})
    assert len(compared(ours, cached).methods) == 2
    other = run_at(tmp_path / "data", 100, 0.03, method="x")
    for run, digest in ((ours, "1"), (other, "2")):
        path = run / "initial.json"
        data = {"data": {"training text": {"bytes": 5, "sha256": digest}}}
        path.write_text(json.dumps(json.loads(path.read_text()) | data))
    with pytest.raises(UserError, match=r"their data differ \(training text, in initial\.json\)"):
        compared(ours, other)


def test_other_held_out_data_and_equal_seeds_are_refused(tmp_path: Path) -> None:
    ours, other = (run_at(tmp_path / name, 100, 0.03) for name in ("ours", "other"))
    with pytest.raises(UserError, match=r"are both compression, seed 0; give only one of them"):
        compared(ours, other)
    path = other / "summary.json"
    changed = json.loads(path.read_text()) | {"evaluated_on": "test", "method": "x"}
    path.write_text(json.dumps(changed))
    with pytest.raises(UserError, match=r"evaluated_on is None in one and 'test' in the other"):
        compared(ours, other)
    path.write_text(json.dumps(changed | {"method": 7}))
    with pytest.raises(UserError, match="'method' is not a string"):
        compared(ours, other)
    for key in ("source", "pruning", "cofi", "torch_pruning"):
        path.write_text(json.dumps(changed | {"evaluated_on": "test", key: [1]}))
        with pytest.raises(UserError, match=f"{key!r} is not a table"):
            compared(ours, other)


def test_an_unknown_method_to_test_against_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--against 'x' is not one of 'compression', 'post-hoc'"):
        compared(two_methods(tmp_path), against="x")


def test_one_run_alone_cannot_be_compared(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="compare needs two runs or more"):
        compared(run_at(tmp_path / "r", 100, 0.03))


def test_names_are_escaped(tmp_path: Path) -> None:
    evil = "<script>|$x_1$"
    for seed, method in ((0, None), (1, evil)):
        run_at(tmp_path / f"r{seed}", 100, 0.03, seed=seed, method=method, metric=evil)
    files = write_methods(compared(tmp_path), tmp_path / "out")
    assert "<script>" not in files["table"].read_text()
