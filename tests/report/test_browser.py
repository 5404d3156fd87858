"""The page in a real browser: its script runs, the scrubber moves, figures are the run's own."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gaugelasso.report.data import load_run
from gaugelasso.report.page import write_page
from tests.report.browser import CHROMIUM, Browser, browser
from tests.report.folders import event, make_run

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
    # Keys move it too.
    tab.value("document.getElementById('step').focus()")
    for kind in ("rawKeyDown", "keyUp"):
        tab.call("Input.dispatchKeyEvent", type=kind, key="End", windowsVirtualKeyCode=35)
    assert tab.text("#now").startswith("step 100 of 100")


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


def test_playing_runs_through_the_steps(tab: Browser, tmp_path: Path) -> None:
    tab.open(page_of(tmp_path, make_run(tmp_path / "r")))
    # The clock of the animation is the test's: no waiting.
    tab.value(
        "window.frames_ = []; window.requestAnimationFrame = f => frames_.push(f);"
        "document.getElementById('play').click()"
    )
    seen = []
    for time in (0, 4000, 8000):
        tab.value(f"frames_.shift()({time})")
        seen.append(tab.value("Number(document.getElementById('step').value)"))
    assert seen == [0, 50, 100]
    assert tab.text("#play") == "Play"
    assert tab.value("frames_.length") == 0


def test_a_population_shows_medians_and_each_seed(tab: Browser, tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f"r{seed}", seed=seed) for seed in range(3)]
    tab.open(page_of(tmp_path, *runs))
    assert figure(tab, "work") == "101"
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
def test_a_phone_shows_the_figures_of_every_table(tab: Browser, tmp_path: Path, seeds: int) -> None:
    runs = [make_run(tmp_path / f"r{seed}", seed=seed) for seed in range(seeds)]
    tab.open(page_of(tmp_path, *runs), width=390, height=844)
    assert tab.value(EDGES)["Before and after"][1] <= 390
    # The others may be scrolled, and then their rows still have a name.
    tab.value("document.querySelectorAll('.wide').forEach(each => { each.scrollLeft = 1e6 })")
    edges = tab.value(EDGES)
    assert {"Saturation", "Largest drops (at most 20)"} <= edges.keys()
    for title, (left, right) in edges.items():
        assert 0 <= left < right <= 390, title


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
