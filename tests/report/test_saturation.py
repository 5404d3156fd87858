"""Saturation: which axes are at their ceiling and which collapsed; figures, table, picture."""

import io
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from gaugelasso.report import heatmap
from gaugelasso.report.data import load_run
from gaugelasso.report.figure import WIDTH_PX
from gaugelasso.report.heatmap import draw_saturation
from gaugelasso.report.run import LAYER_KINDS, Run
from gaugelasso.report.saturation import extents, layer_list, saturation_table, shares_table
from tests.report.folders import INITIAL, event, final_widths, make_run


def one_run(path: Path, layers: int = 3, seed: int = 0, **ends: int) -> Run:
    """Filters: 16, 1 and 0 of 16; values: 8, 4 and 4 of 8."""
    widths = final_widths(layers, {("d_f", 1): 1, ("d_v", 1): 4, ("d_v", 2): 4}, {"mlp_2"}) | ends
    drops = [event(40, 1000.0, 500.0, {"D": 1}, [], widths)]
    return load_run(make_run(path, layers=layers, seed=seed, events=drops))


def test_extents_of_every_axis(tmp_path: Path) -> None:
    found = extents([one_run(tmp_path / "r", D=6)])
    assert [*found] == [*LAYER_KINDS, "D", "d_e", "d_c"]
    assert [axis.share for axis in found["d_v"]] == [1, 0.5, 0.5]
    full, collapsed, removed = found["d_f"]
    assert (full.at_ceiling, full.collapsed, full.removed) == (True, False, False)
    assert (collapsed.at_ceiling, collapsed.collapsed, collapsed.removed) == (False, True, False)
    assert (removed.at_ceiling, removed.collapsed, removed.removed) == (False, True, True)
    (sites,) = found["D"]
    assert (sites.depth, sites.initial, sites.final) == (None, 8, 6)


def test_over_seeds_widths_are_medians_that_a_seed_has(tmp_path: Path) -> None:
    runs = [one_run(tmp_path / f"r{d}", seed=d, D=d) for d in (2, 3, 8)]
    assert extents(runs)["D"][0].final == 3
    # Of two middle values the larger one, not their mean.
    assert extents(runs[1:])["D"][0].final == 8
    assert "medians of 3 seeds" in saturation_table(runs).note


def test_the_table_lists_layers_at_the_ceiling_and_collapsed(tmp_path: Path) -> None:
    rows = {row[0]: row[1:] for row in saturation_table([one_run(tmp_path / "r", D=6)]).rows}
    assert rows["d_f"] == ["MLP filters", "16", "1–16", "53%", "0", "1", "2"]
    assert rows["d_v"] == ["attention values", "8", "4–8", "50%", "0", "", ""]
    assert rows["d_k"] == ["attention keys", "4", "4", "100%", "0–2", "", ""]
    assert rows["D"] == ["residual sites", "8", "6", "75%", "", "", ""]
    assert rows["d_e"][4] == "yes"


def test_an_axis_removed_in_every_layer(tmp_path: Path) -> None:
    widths = final_widths(2, {}, {"mlp_0", "mlp_1"})
    run = load_run(make_run(tmp_path / "r", events=[event(9, 9.0, 5.0, {"D": 1}, [], widths)]))
    rows = {row[0]: row[1:] for row in saturation_table([run]).rows}
    assert rows["d_f"] == ["MLP filters", "16", "—", "—", "", "", "0–1"]


def test_shares_layer_by_layer(tmp_path: Path) -> None:
    table = shares_table([one_run(tmp_path / "r", D=6)])
    column = table.headers.index("d_f")
    assert [row[column] for row in table.rows] == ["16 (100%) ▲", "1 (6%) ▼", "—", "16"]
    assert [row[0] for row in table.rows] == ["0", "1", "2", "initial"]
    assert table.note.startswith("D 6 (75%); d_e 8 (100%) ▲; d_c 8 (100%) ▲. ")


@pytest.mark.parametrize(
    ("depths", "text"), [([], ""), ([4], "4"), ([0, 1, 2], "0–2"), ([0, 2, 3, 9], "0, 2–3, 9")]
)
def test_adjacent_layers_are_joined(depths: list[int], text: str) -> None:
    assert layer_list(depths) == text


def test_cells_frames_and_crosses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(heatmap, "save", lambda figure, path: figures.append(figure))
    draw_saturation([one_run(tmp_path / "r", D=6)], io.BytesIO())
    layers, ends, _ = figures[0].axes
    cells, frames = layers.collections
    assert cells.get_array().shape[:2] == (3, len(INITIAL))
    assert len(frames.get_paths()) == 3 * len(INITIAL) - 3 - 1 - 2  # removed, collapsed, half
    crosses, collapsed = layers.lines
    assert [*zip(*crosses.get_data(), strict=True)] == [(4, 2), (5, 2), (6, 2)]
    ((x, y),) = zip(*collapsed.get_data(), strict=True)  # beside the number in its cell
    assert (collapsed.get_marker(), round(x), y) == ("v", LAYER_KINDS.index("d_f"), 1)
    assert not ends.lines
    assert [text.get_text() for text in ends.texts] == ["75", "100", "100"]


def test_only_marks_that_occur_are_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(heatmap, "save", lambda figure, path: figures.append(figure))
    halves = {(kind, depth): width // 2 for kind, width in INITIAL.items() for depth in (0, 1)}
    ends = {"D": 4, "embedding.d_e": 4, "classifier.d_c": 4}
    for name, widths in (
        ("none", final_widths(2, halves) | ends),
        ("collapsed", final_widths(2, {**halves, ("d_f", 0): 1}) | ends),
        ("removed", final_widths(2, halves, {"mlp_1"}) | ends),
        ("ceiling", final_widths(2, halves) | ends | {"D": 8}),
    ):
        drops = [event(40, 1000.0, 500.0, {"D": 1}, [], widths)]
        draw_saturation([load_run(make_run(tmp_path / name, events=drops))], io.BytesIO())
    labels = [
        [text.get_text() for legend in figure.legends for text in legend.get_texts()]
        for figure in figures
    ]
    assert labels == [
        [],
        ["collapsed: 10% or less kept"],
        ["operator removed"],
        ["at its ceiling: 90% or more kept"],
    ]


@pytest.mark.parametrize("layers", [1, 100])
def test_the_picture_of_few_and_of_many_layers(tmp_path: Path, layers: int) -> None:
    folder = make_run(tmp_path / "r", layers=layers, rows=0, events=[], finished=False)
    buffer = io.BytesIO()
    draw_saturation([load_run(folder)], buffer)
    buffer.seek(0)
    image = imread(buffer, format="png")[..., :3]
    assert image.shape[1] == WIDTH_PX
    blue = image[..., 2] - image[..., 0] > 0.4
    assert blue.any(axis=0).mean() > 0.8  # every axis at 100%: the cells reach across
