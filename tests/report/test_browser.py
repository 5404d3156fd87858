"""The page in a real browser: its script runs, the scrubber moves, figures are the run's own."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gaugelasso.report.data import load_run
from gaugelasso.report.page import write_page
from tests.report.browser import CHROMIUM, Browser, browser
from tests.report.folders import event, initial_widths, make_run

# `make test` sets up all that it needs, and a browser is no package of Python.
pytestmark = pytest.mark.skipif(
    CHROMIUM is None and not os.environ.get("GAUGELASSO_BROWSER"),
    reason="chromium is not installed: apt install chromium",
)

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(autouse=True)
def quiet(tab: Browser) -> Iterator[None]:
    """No test may leave a message in the console."""
    tab.problems.clear()
    yield
    assert tab.problems == []


def page_of(folder: Path, *runs: Path) -> Path:
    write_page([load_run(run) for run in runs], folder / "page.html", PNG, None)
    return folder / "page.html"


def change_rows(run: Path, **values: Any) -> None:
    """Replace figures in each row of the log."""
    log = run / "metrics.jsonl"
    rows = [json.loads(line) | values for line in log.read_text().splitlines()]
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))


def unlike_seeds(folder: Path) -> list[Path]:
    """Three seeds whose figures differ, as those of real runs do: no mean is a median."""
    runs = []
    for seed in range(3):
        run = make_run(folder / f"r{seed}", seed=seed, loss=0.0441 + 0.00137 * seed**2)
        change_rows(run, step_ms=12.3 + 7.7 * seed**2)
        path = run / "summary.json"
        summary = json.loads(path.read_text())
        summary["metric"]["value"] -= 0.0123 * seed**2
        summary["parameters_final"] += 31 * seed**2
        summary |= {"wall_s": 61.7 + 9.9 * seed, "training_fma": 40_000.0 + 1777.0 * seed**2}
        path.write_text(json.dumps(summary))
        runs.append(run)
    return runs


def figure(tab: Browser, name: str) -> str:
    return str(tab.value(f"document.querySelector('[data-figure={name}]').firstChild.data"))


def width(tab: Browser, axis: str) -> str:
    return str(tab.value(f"document.querySelector('[data-axis=\"{axis}\"] span').textContent"))


def scrub(tab: Browser, share: float) -> None:
    """Press the scrubber at a share of its way; its thumb is 20 pixels wide."""
    box = tab.box("#step")
    tab.press(box["x"] + 10 + share * (box["width"] - 20), box["y"] + box["height"] / 2)


def test_the_page_opens_with_the_figures_of_the_summary(tab: Browser, tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", loss=0.03125)
    tab.open(page_of(tmp_path, run))
    summary = json.loads((run / "summary.json").read_text())
    assert figure(tab, "work") == f"{summary['fma_final']:,.0f}"
    assert figure(tab, "ratio") == f"{summary['compression']:.1f}×"
    assert figure(tab, "parameters") == f"{summary['parameters_final']:,}"
    assert figure(tab, "loss") == f"{summary['loss']:.4g}"
    assert figure(tab, "metric") == f"{summary['metric']['value']:.2%}"
    for axis, number in summary["widths"].items():
        assert width(tab, axis.removeprefix("operators.")) == f"{number:,}"
    assert tab.text("#now") == "step 100 of 100, cooldown"


def test_the_scrubber_moves_and_figures_change(tab: Browser, tmp_path: Path) -> None:
    tab.open(page_of(tmp_path, make_run(tmp_path / "r")))
    assert width(tab, "attention_1.d_k") == "—"
    scrub(tab, 0.0)
    assert tab.text("#now").startswith("step 0 of 100")
    assert (figure(tab, "work"), width(tab, "attention_1.d_k")) == ("1,000", "4")
    assert tab.text("#event").startswith("No structural event yet")
    scrub(tab, 0.25)
    assert (figure(tab, "work"), width(tab, "mlp_0.d_f")) == ("600", "4")
    assert figure(tab, "parameters") == "500"
    assert "Event at step 20: 1,000 → 600 FMA per token; dropped 12" in tab.text("#event")
    # The bar has the share of its width.
    bar, track = tab.box("[data-axis='mlp_0.d_f'] b"), tab.box("[data-axis='mlp_0.d_f'] .bar")
    assert bar["width"] == pytest.approx(track["width"] * 4 / 16, abs=0.5)
    # Keys move it too, and a reader of the screen says where it is.
    tab.value("document.getElementById('step').focus()")
    tab.key("End", 35)
    assert tab.text("#now").startswith("step 100 of 100")
    spoken = tab.value("document.getElementById('step').getAttribute('aria-valuetext')")
    assert spoken == "step 100 of 100, cooldown, 100 FMA per token"


def test_hover_and_press_show_the_numbers_of_a_width(tab: Browser, tmp_path: Path) -> None:
    tab.open(page_of(tmp_path, make_run(tmp_path / "r")), width=390, height=844)
    for axis, told in (
        ("mlp_0.d_f", "layer 0: d_f, MLP filters. 4 of initially 16 channels (25%)."),
        ("attention_1.d_v", "layer 1: d_v, attention values. removed, of 8."),
        ("D", "D, residual sites. 6 of initially 8 channels (75%)."),
    ):
        box = tab.box(f"[data-axis='{axis}']")
        tab.hover(box["x"] + 5, box["y"] + 5)
        assert tab.text("#tip") == told
        assert not tab.value("document.getElementById('tip').hidden")
    box = tab.box(".curves .work svg")
    tab.press(box["x"] + box["width"] / 2, box["y"] + 50)
    assert 30 < tab.value("Number(document.getElementById('step').value)") < 70


TIP_IS_HIDDEN = "document.getElementById('tip').hidden"


def test_the_tip_of_a_tap_stays_until_the_next_tap_or_scroll(tab: Browser, tmp_path: Path) -> None:
    tab.open(page_of(tmp_path, make_run(tmp_path / "r")), width=390, height=844)
    box = tab.box("[data-axis='mlp_0.d_f']")
    bar = (box["x"] + 5, box["y"] + 5)
    tab.tap(*bar)
    assert not tab.value(TIP_IS_HIDDEN)
    tab.tap(3, bar[1])
    assert tab.value(TIP_IS_HIDDEN)
    tab.tap(*bar)
    assert not tab.value(TIP_IS_HIDDEN)
    tab.value("scrollBy(0, 40)")
    tab.next_frame()
    assert tab.value(TIP_IS_HIDDEN)


def test_a_tip_does_not_outlive_its_step(tab: Browser, tmp_path: Path) -> None:
    tab.open(page_of(tmp_path, make_run(tmp_path / "r")))
    box = tab.box("[data-axis='mlp_0.d_f']")
    tab.hover(box["x"] + 5, box["y"] + 5)
    assert not tab.value(TIP_IS_HIDDEN)
    tab.value("document.getElementById('step').focus({ preventScroll: true })")
    tab.key("Home", 36)
    assert tab.value(TIP_IS_HIDDEN)


def play(tab: Browser) -> None:
    """The clock of the animation is the test's: no waiting."""
    tab.value(
        "window.frames_ = []; window.requestAnimationFrame = f => frames_.push(f);"
        "window.cancelAnimationFrame = () => { frames_.length = 0 };"
        "document.getElementById('play').click()"
    )


STEP = "Number(document.getElementById('step').value)"
LIVE = "document.getElementById('now').ariaLive"


def test_playing_runs_through_the_steps(tab: Browser, tmp_path: Path) -> None:
    tab.open(page_of(tmp_path, make_run(tmp_path / "r")))
    play(tab)
    seen, live = [], []
    for time in (0, 4000, 8000):
        tab.value(f"frames_.shift()({time})")
        seen.append(tab.value(STEP))
        live.append(tab.value(LIVE))
    assert seen == [0, 50, 100]
    assert live == ["off", "off", "polite"]  # only the end is read aloud
    assert tab.text("#play") == "Play"
    assert tab.value("frames_.length") == 0


def test_a_press_on_a_curve_ends_playing_and_other_buttons_do_nothing(
    tab: Browser, tmp_path: Path
) -> None:
    tab.open(page_of(tmp_path, make_run(tmp_path / "r")))
    box = tab.box(".curves .work svg")
    play(tab)
    tab.value("frames_.shift()(0)")
    tab.press(box["x"] + box["width"] * 0.9, box["y"] + 50, button="right")
    assert (tab.value(STEP), tab.text("#play")) == (0, "Pause")
    tab.press(box["x"] + box["width"] / 2, box["y"] + 50)
    assert 30 < tab.value(STEP) < 70
    assert (tab.text("#play"), tab.value("frames_.length")) == ("Play", 0)


# Name of a row and its figure after, of the table.
AFTER = """Object.fromEntries([...document.querySelectorAll(
  'table[aria-label="Before and after"] tbody tr')].map(row => [
  row.cells[0].textContent.split(' (')[0], row.cells[2].textContent.split(' ±')[0]]))"""


def test_a_population_shows_the_means_of_the_tables_and_each_seed(
    tab: Browser, tmp_path: Path
) -> None:
    tab.open(page_of(tmp_path, *unlike_seeds(tmp_path)))
    rows = tab.value(AFTER)
    assert rows["parameters"] == "551.7"
    for key, name in (
        ("work", "FMA per token"),
        ("parameters", "parameters"),
        ("loss", "held-out loss"),
        ("metric", "accuracy"),
        ("time", "step time"),
    ):
        assert figure(tab, key) == rows[name], name
    assert f"{figure(tab, 'ratio')} smaller at {figure(tab, 'metric')}" in tab.text("h1")
    assert "100 – 102" in tab.text("[data-figure=work]")
    tab.value(
        "(() => { const e = document.getElementById('run'); e.value = 2;"
        "e.dispatchEvent(new Event('change')) })()"
    )
    assert figure(tab, "work") == "102"
    assert tab.value("document.querySelectorAll('.curves .work path').length") == 3
    assert tab.value("document.querySelectorAll('.curves .work path.one').length") == 1


@pytest.mark.parametrize(("size", "dark"), [((390, 844), False), ((1100, 900), True)])
def test_the_page_fits_a_phone_and_has_a_dark_form(
    tab: Browser, tmp_path: Path, size: tuple[int, int], dark: bool
) -> None:
    tab.open(page_of(tmp_path, make_run(tmp_path / "r", layers=12)), *size, dark=dark)
    assert tab.value("document.documentElement.scrollWidth") == size[0]
    color = tab.value("getComputedStyle(document.body).backgroundColor")
    assert color == ("rgb(20, 24, 29)" if dark else "rgb(255, 255, 255)")


# Titles of the tables, and where the first column begins and the last one ends.
EDGES = """Object.fromEntries([...document.querySelectorAll('.wide tr:last-child')].map(row => [
  row.closest('figure').previousElementSibling.textContent,
  [row.firstChild.getBoundingClientRect().left, row.lastChild.getBoundingClientRect().right]]))"""


@pytest.mark.parametrize("seeds", [1, 3])
@pytest.mark.parametrize("size", [360, 430, 768])
def test_a_phone_shows_the_figures_of_every_table(
    tab: Browser, tmp_path: Path, size: int, seeds: int
) -> None:
    tab.open(page_of(tmp_path, *unlike_seeds(tmp_path)[:seeds]), width=size, height=844)
    assert tab.value(EDGES)["Before and after"][1] <= size
    assert tab.value("document.querySelector('.wide td').offsetWidth") >= 90
    # The others may be scrolled, and then their rows still have a name.
    tab.value("document.querySelectorAll('.wide').forEach(each => { each.scrollLeft = 1e6 })")
    edges = tab.value(EDGES)
    assert {"Saturation", "Largest drops (at most 20)"} <= edges.keys()
    for title, (left, right) in edges.items():
        assert 0 <= left < right <= size, title
    # Long text is not squeezed into a column of single words.
    assert tab.value(
        "Math.min(...[...document.querySelectorAll("
        "'td.long:nth-last-child(-n+2):not(:nth-child(2))')].map(cell => cell.offsetWidth))"
    ) >= 170  # fmt: skip


def test_heads_of_the_structure_keep_their_words_together(tab: Browser, tmp_path: Path) -> None:
    tab.open(page_of(tmp_path, make_run(tmp_path / "r")), width=280, height=640)
    lines = """[...document.querySelectorAll('#structure thead th')].map(head => {
      const range = document.createRange();
      range.selectNode(head.firstChild);
      return range.getClientRects().length;
    })"""
    assert set(tab.value(lines)) == {1}
    assert tab.value("document.documentElement.scrollWidth") == 280


def test_paper_and_forced_colours_keep_the_bars(tab: Browser, tmp_path: Path) -> None:
    tab.open(page_of(tmp_path, make_run(tmp_path / "r")))
    style = "getComputedStyle(document.querySelector('#structure .bar b'))"
    assert tab.value(f"{style}.printColorAdjust") == "exact"
    forced = {"name": "forced-colors", "value": "active"}
    tab.call("Emulation.setEmulatedMedia", features=[forced])
    assert tab.value("matchMedia('(forced-colors: active)').matches")
    assert tab.value(f"{style}.backgroundColor") == "rgb(0, 114, 178)"


# For each curve, whether its dot is on the drawn line.
ON_LINE = """[...document.querySelectorAll('.curves svg')].map(svg => {
  const dot = svg.querySelector('circle'), path = svg.querySelector('path');
  path.style.strokeLinecap = 'square';  // its ends are rounded to tenths of a pixel
  return path.isPointInStroke(new DOMPoint(dot.cx.baseVal.value, dot.cy.baseVal.value));
})"""


def test_the_dot_is_on_its_curve_and_the_figures_are_of_the_dot(
    tab: Browser, tmp_path: Path
) -> None:
    tab.open(page_of(tmp_path, make_run(tmp_path / "r")))
    for step in (0, 5, 20, 25, 47, 100):
        tab.value(
            f"(() => {{ const e = document.getElementById('step'); e.value = {step};"
            "e.dispatchEvent(new Event('input')) })()"
        )
        assert tab.value(ON_LINE) == [True] * 4, step
        if step == 25:  # between 5 / 4 and 5 / 9, on a log scale
            assert figure(tab, "loss") == tab.text(".curves .loss b") == "0.8333"
        if step == 5:  # before the first row
            assert figure(tab, "loss") == tab.text(".curves .loss b") == "5"


def test_a_metric_that_was_never_measured_has_no_curve(tab: Browser, tmp_path: Path) -> None:
    """As that of a loop of one's own, which evaluates at the end."""
    change_rows(run := make_run(tmp_path / "r"), accuracy=None)
    tab.open(page_of(tmp_path, run))
    assert figure(tab, "metric") == "99.96%"
    kinds = "[...document.querySelectorAll('.curves figure')].map(each => each.className)"
    assert tab.value(kinds) == ["loss", "work", "time"]
    scrub(tab, 0.5)
    assert tab.value("document.querySelector('[data-figure=metric]').parentElement.hidden")


def test_a_single_evaluation_is_seen(tab: Browser, tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", rows=2, finished=False, metric="bits")
    tab.open(page_of(tmp_path, run))
    style = "getComputedStyle(document.querySelector('.curves .metric path'))"
    assert tab.value(f"[{style}.strokeLinecap, {style}.strokeWidth]") == ["round", "6px"]
    charts = "[...document.querySelectorAll('.curves svg')]"
    assert min(tab.value(f"{charts}.map(svg => svg.querySelectorAll('.grid').length)")) >= 2


def test_a_large_ratio_reads_as_in_the_tables(tab: Browser, tmp_path: Path) -> None:
    last = event(40, 1000.0, 0.02, {"D": 2}, [], initial_widths(2) | {"D": 6})
    tab.open(page_of(tmp_path, make_run(tmp_path / "r", events=[last])))
    assert figure(tab, "ratio") == "50,000×"
    assert "50,000× smaller" in tab.text("h1")


def test_a_model_of_the_user_has_a_row_for_each_axis(tab: Browser, tmp_path: Path) -> None:
    narrow = {"hidden.0": 3, "a.long.name.of.an.axis": 8}
    run = make_run(tmp_path / "r", events=[event(40, 1000.0, 400.0, {"hidden.0": 5}, [], narrow)])
    wide = {"hidden.0": 8, "a.long.name.of.an.axis": 8, "gone": 4}
    own = {"model_class": "mine:Perceptron", "structure": {}, "widths": wide}
    path = run / "initial.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | own))
    tab.open(page_of(tmp_path, run), width=390, height=844)
    assert [width(tab, axis) for axis in wide] == ["3", "8", "—"]
    assert tab.value("document.querySelectorAll('#structure tbody tr').length") == 3
    assert tab.value("document.documentElement.scrollWidth") == 390
    box = tab.box("[data-axis='hidden.0']")
    tab.hover(box["x"] + 5, box["y"] + 5)
    assert tab.text("#tip") == "hidden.0. 3 of initially 8 channels (37.5%)."


def test_a_run_without_rows_and_events_opens(tab: Browser, tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", rows=0, events=[], finished=False)
    tab.open(page_of(tmp_path, run))
    assert (figure(tab, "work"), figure(tab, "loss")) == ("1,000", "—")


def test_names_of_a_run_cannot_run_code(tab: Browser, tmp_path: Path) -> None:
    evil = "</script><img src=x onerror=alert(1)><script>alert(2)</script>"
    run = make_run(tmp_path / "r", task=evil, metric=evil)
    for name in ("initial.json", "events.jsonl", "summary.json"):
        text = (run / name).read_text().replace("mlp_0.d_f", "mlp_0.<img src=y onerror=alert(3)>")
        (run / name).write_text(text)
    tab.open(page_of(tmp_path, run))
    assert tab.value("document.querySelectorAll('img[src=x], img[src=y]').length") == 0
    assert tab.value("document.scripts.length") == 2
    assert evil in tab.text("#figures")
