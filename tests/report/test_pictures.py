"""The pictures: their size, their content, and unusual runs."""

import io
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imread

from gaugelasso.report import axes_profile, profile, tradeoff, training
from gaugelasso.report.axes_profile import draw_axes_profile
from gaugelasso.report.data import Condition, load_run
from gaugelasso.report.figure import WIDTH_PX, round_ticks, spread
from gaugelasso.report.profile import draw_profile, snapshots
from gaugelasso.report.run import Run
from gaugelasso.report.tradeoff import draw_tradeoff
from gaugelasso.report.training import draw_training
from tests.report.folders import event, initial_widths, make_run, two_drops

HOSTILE = "$\\frac{x</b>\u2603\n%"


def pixels(draw: Callable[..., None], runs: Sequence[Run | Condition]) -> np.ndarray:
    buffer = io.BytesIO()
    draw(runs, buffer)
    buffer.seek(0)
    return imread(buffer, format="png")[..., :3]


def ink(image: np.ndarray) -> float:
    return float((image.min(axis=2) < 0.9).mean())


def test_profile_of_seeds(tmp_path: Path) -> None:
    runs = [load_run(make_run(tmp_path / f"r{seed}", seed=seed)) for seed in range(3)]
    before = dict(matplotlib.rcParams)
    image = pixels(draw_profile, runs)
    assert image.shape[1] == WIDTH_PX
    assert 0.02 < ink(image) < 0.5
    assert dict(matplotlib.rcParams) == before


def panels(monkeypatch: pytest.MonkeyPatch, runs: list[Run]) -> dict[str, Axes]:
    """The profile's panels by title, before rendering."""
    figures: list[Figure] = []
    monkeypatch.setattr(profile, "save", lambda figure, path: figures.append(figure))
    draw_profile(runs, io.BytesIO())
    return {axes.get_title().split("$")[1]: axes for axes in figures[0].axes if axes.get_title()}


def test_every_axis_of_an_own_model_has_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = load_run(make_run(tmp_path / "r"))
    long = f"a.module.{'deep.' * 9}in"
    widths = {long: 64, HOSTILE: 32, **{f"axis{n}": 16 - n % 9 for n in range(60)}}
    many = replace(run, initial={**run.initial, "widths": widths}, events=())
    assert pixels(draw_axes_profile, [many]).shape[1] == WIDTH_PX
    figures: list[Figure] = []
    monkeypatch.setattr(axes_profile, "save", lambda figure, path: figures.append(figure))
    for each in ([run], [many]):
        draw_axes_profile(each, io.BytesIO())
    few, most = (figure.axes[0] for figure in figures)
    names = [label.get_text() for label in few.get_yticklabels()]
    assert len(names) == len(few.collections) == len(run.initial["widths"])
    assert names[0] == max(run.initial["widths"], key=run.initial["widths"].__getitem__)
    assert len(most.get_yticklabels()) == 40
    assert most.get_yticklabels()[0].get_text() == f"...{long[-33:]}"
    assert "of the 40 widest of 62 axes" in most.get_title()


def test_lines_and_crosses_of_the_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = panels(monkeypatch, [load_run(make_run(tmp_path / "r"))])
    assert len(found) == 7
    *lines, cross = found["d_{ai}"].lines
    assert [line.get_ydata().tolist() for line in lines[:2]] == [[8, 8], [8, 8]]
    np.testing.assert_equal(lines[-1].get_ydata(), [8, np.nan])
    assert cross.get_marker() == "x"
    assert list(cross.get_xdata()) == [1]
    # Removed at step 40, the third of four snapshots: the cross has the colour of that line.
    assert cross.get_color() == lines[2].get_color()
    assert [line.get_marker() for line in found["d_{f}"].lines] == ["o"] * 4


def test_a_cross_has_the_colour_of_the_first_snapshot_without_its_operator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two snapshots the later one, and after a return the time when it went for good."""
    first, second, third = two_drops(2, 0)
    back = {**event(50, 100.0, 600.0, {}, [], second["widths"]), "returned_to": 20}
    again = {**third, "step": 60}
    run = load_run(make_run(tmp_path / "r", events=[first, second, third, back, again]))
    monkeypatch.setattr(profile, "snapshots", lambda runs: [0, 45, 55, 100])
    *lines, cross = panels(monkeypatch, [run])["d_{ai}"].lines
    assert cross.get_color() == lines[3].get_color() != lines[1].get_color()


def test_the_range_over_seeds_is_hatched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [load_run(make_run(tmp_path / f"r{seed}", seed=seed)) for seed in range(3)]
    axes = panels(monkeypatch, runs)["d_{f}"]
    (band,) = [c for c in axes.collections if c.get_hatch()]
    heights = band.get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == (4, 16)
    at_first = band.get_paths()[0].vertices[:, 1][band.get_paths()[0].vertices[:, 0] == 0]
    assert sorted(set(at_first)) == [4, 5]
    assert axes.lines[-1].get_ydata().tolist() == [4, 16]  # the median


def test_training_curves_of_a_metric_with_a_strange_name(tmp_path: Path) -> None:
    runs = [load_run(make_run(tmp_path / f"r{n}", seed=n, metric=HOSTILE)) for n in range(2)]
    image = pixels(draw_training, runs)
    assert image.shape[1] == WIDTH_PX
    half = WIDTH_PX // 2
    assert ink(image[:, :half]) > 0.01
    assert ink(image[:, half:]) > 0.01


def test_a_metric_that_is_the_loss_shares_its_axis(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On two scales the held-out loss could appear to be below the training loss."""
    run = load_run(make_run(tmp_path / "r", metric="masked_mse"))
    figures: list[Figure] = []
    monkeypatch.setattr(training, "save", lambda figure, path: figures.append(figure))
    assert run.summary is not None
    for one in (run, with_metric(run, run.summary["loss"])):
        draw_training([one], io.BytesIO())
    apart, shared = ([axes.get_ylabel() for axes in figure.axes] for figure in figures)
    assert apart == ["training loss", "step time (ms)", "masked_mse", "FMA per token"]
    assert shared == ["loss", "step time (ms)", "FMA per token"]
    legend = figures[1].axes[0].get_legend()
    assert legend is not None
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ["training loss", "loss target", "held-out loss (masked_mse)"]


def test_a_single_row_is_a_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line of one point would not be seen."""
    run = load_run(make_run(tmp_path / "r", rows=1))
    row = run.metrics[0] | {"step": 20, "accuracy": 0.5}
    figures: list[Figure] = []
    monkeypatch.setattr(training, "save", lambda figure, path: figures.append(figure))
    draw_training([replace(run, metrics=(row,))], io.BytesIO())
    lines = [line for axes in figures[0].axes for line in axes.lines]
    points = [line for line in lines if len(np.asarray(line.get_xdata())) == 1]
    names = {line.get_label() for line in points if line.get_marker() == "o"}
    assert names == {"training loss", "accuracy", "step time (running median)"}


def test_the_legend_explains_crosses_only_if_there_are_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(profile, "save", lambda figure, path: figures.append(figure))
    run = load_run(make_run(tmp_path / "r"))
    unchanged = replace(run, events=())
    # The median of three runs decides: an operator that one of them removed gets no cross.
    for some in ([run], [unchanged], [run, unchanged, unchanged]):
        draw_profile(some, io.BytesIO())
    legends = [[axes.get_legend() for axes in figure.axes] for figure in figures]
    labels = [
        [text.get_text() for legend in found if legend for text in legend.get_texts()]
        for found in legends
    ]
    assert "operator removed (by the step of its colour)" in labels[0]
    for texts in labels[1:]:
        assert "cooldown starts" in texts
        assert "operator removed (by the step of its colour)" not in texts


def test_the_title_tells_that_nothing_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(profile, "save", lambda figure, path: figures.append(figure))
    still = load_run(make_run(tmp_path / "s", events=[]))
    without_drop = event(10, 1000.0, 1000.0, {}, [], initial_widths(2))
    for one in (
        load_run(make_run(tmp_path / "r")),
        replace(still, events=(without_drop,)),
        replace(still, summary=None),
    ):
        draw_profile([one], io.BytesIO())
    assert [figure.get_suptitle().partition("seed 0")[2] for figure in figures] == [
        "", ": nothing was removed", ": nothing was removed yet",
    ]  # fmt: skip


def test_lines_and_bands_of_the_training_curves_are_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(training, "save", lambda figure, path: figures.append(figure))
    runs = [load_run(make_run(tmp_path / f"r{seed}", seed=seed)) for seed in range(3)]
    unfinished = [replace(run, metrics=run.metrics[:5], summary=None) for run in runs]
    for some in (runs, runs[:1], unfinished[:1]):
        draw_training(some, io.BytesIO())
    labels = [
        [text.get_text() for legend in figure.legends for text in legend.get_texts()]
        for figure in figures
    ]
    assert labels == [
        ["median over seeds", "range over seeds", "one seed", "cooldown starts"],
        ["cooldown starts"],
        [],
    ]


@pytest.mark.parametrize("draw", [draw_profile, draw_training])
def test_a_run_without_rows_and_with_strange_names(
    tmp_path: Path, draw: Callable[..., None]
) -> None:
    folder = make_run(tmp_path / "r", layers=1, rows=0, events=[], finished=False, task=HOSTILE)
    assert ink(pixels(draw, [load_run(folder)])) > 0.005


def with_metric(run: Run, value: float | None) -> Run:
    summary = dict(run.summary or {})
    return replace(run, summary={**summary, "metric": {**summary["metric"], "value": value}})


def test_arms_have_different_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every seed and the mean; errors on a log axis with a place for zero."""
    runs = [load_run(make_run(tmp_path / f"r{seed}", seed=seed)) for seed in (0, 20, 40)]
    good = [with_metric(run, value) for run, value in zip(runs, (1.0, 0.99, 0.98), strict=True)]
    arms = [Condition("_good", (), good, 3), Condition("one $ left", (), runs[:1], 3)]
    figures: list[Figure] = []
    monkeypatch.setattr(tradeoff, "save", lambda figure, path: figures.append(figure))
    draw_tradeoff(arms, io.BytesIO())
    (axes,) = figures[0].axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    seeds, mean, other, _ = [line for line in axes.lines if line.get_linestyle() == "None"]
    assert list(seeds.get_xdata()) == [100, 120, 140]
    floor = seeds.get_ydata()[0]
    assert seeds.get_ydata() == pytest.approx([floor, 0.01, 0.02])
    assert 0 < floor < 0.0004
    assert (*mean.get_xdata(), *mean.get_ydata()) == pytest.approx((120, 0.01))
    assert mean.get_markersize() > seeds.get_markersize()
    assert seeds.get_color() == mean.get_color() != other.get_color()
    (legend,) = figures[0].legends
    assert [text.get_text().strip() for text in legend.get_texts()] == ["_good", r"one \$ left"]


@pytest.mark.parametrize(
    ("accuracies", "top"),
    [((0.2, 0.95), 1.0), ((0.2, 1.0), 1.0), ((0.0, 0.5), 1.0), ((0.98, 0.99), 0.028)],
)
def test_an_error_rate_ends_at_one(
    accuracies: tuple[float, float], top: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = load_run(make_run(tmp_path / "r"))
    arms = [Condition("arm", (), [with_metric(run, value) for value in accuracies], 2)]
    figures: list[Figure] = []
    monkeypatch.setattr(tradeoff, "save", lambda figure, path: figures.append(figure))
    draw_tradeoff(arms, io.BytesIO())
    assert figures[0].axes[0].get_ylim()[1] == pytest.approx(top)


@pytest.mark.parametrize("metric", ["perplexity", HOSTILE, "accuracy"])
def test_arms_without_and_with_figures_are_drawn(tmp_path: Path, metric: str) -> None:
    run = load_run(make_run(tmp_path / "r", metric=metric, task=HOSTILE))
    without = Condition(HOSTILE, (), [with_metric(run, None)], 1)
    assert ink(pixels(draw_tradeoff, [without])) > 0.002
    several = [Condition(f"arm {number}", (), [run], 1) for number in range(12)]
    image = pixels(draw_tradeoff, [without, *several])
    assert image.shape[1] == WIDTH_PX
    assert ink(image) > 0.005


def test_snapshots_take_equal_ratios_of_work(tmp_path: Path) -> None:
    run = load_run(make_run(tmp_path / "r"))
    assert snapshots([run]) == [0, 20, 40, 100]
    still = load_run(make_run(tmp_path / "s", events=[]))
    assert snapshots([still]) == [0, 100]


def test_spread_over_curves_of_different_steps() -> None:
    structure = [([0, 10], [8.0, 4.0]), ([0, 20], [6.0, 2.0]), ([0], [7.0])]
    grid, median, low, high = spread(structure, steps=True)
    assert grid.tolist() == [0, 10, 20]
    assert median.tolist() == [7, 6, 4]
    assert low.tolist() == [6, 4, 2]
    assert high.tolist() == [8, 7, 7]
    # A loss curve ends with its run, and lines join its points.
    grid, median, _, high = spread([([0, 10], [0.0, 1.0]), ([0, 20], [0.0, 4.0]), ([], [])])
    assert median.tolist() == [0, 1.5, 4]
    assert high.tolist() == [0, 2, 4]


def test_ticks_are_round_and_few() -> None:
    assert round_ticks(0.9, 150, base=2) == [2, 8, 32, 128]
    assert round_ticks(0.003, 20) == [0.01, 0.1, 1, 10]
    assert round_ticks(156e3, 480e3) == [200e3, 300e3, 400e3]
    assert round_ticks(141_000, 186_000) == [150_000, 160_000, 170_000, 180_000]
    assert round_ticks(1800, 26_000) == pytest.approx([2000, 5000, 10_000, 20_000])
