"""The page and the whole report: escaped, self-contained, for every state of a run."""

import ast
import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

import gaugelasso.report
from gaugelasso.errors import UserError
from gaugelasso.report import common_folder, write_report
from gaugelasso.report.data import load_run
from gaugelasso.report.page import write_page
from tests.report.folders import (
    NEXT,
    event,
    final_widths,
    initial_widths,
    make_run,
    two_drops,
)

EVIL = "<script>alert('x')</script>\"&"


class Tags(HTMLParser):
    """The elements of a page, and the text between them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_every_string_of_a_run_is_escaped(tmp_path: Path) -> None:
    # A slash cannot be in a folder's name.
    folder = make_run(
        tmp_path / EVIL.replace("/", ""),
        task=EVIL,
        metric=EVIL,
        next_to_go=[NEXT[0] | {"axis": EVIL}],
        changes={"compress": {"accounting": EVIL}, "model": {EVIL: EVIL}},
    )
    for name in ("environment.json", "events.jsonl"):
        text = (folder / name).read_text()
        text = text.replace("CPU, 2 cores", "<script>").replace("attention_1", "attention_1<b>")
        (folder / name).write_text(text)
    page = tmp_path / "page.html"
    write_page([load_run(folder)], page, b"one", b"two")
    parsed = Tags(page.read_text())
    names = {tag for tag, _ in parsed.tags}
    assert not names & {"b", "link", "iframe"}
    scripts = [found for tag, found in parsed.tags if tag == "script"]
    assert scripts == [{"type": "application/json", "id": "data"}, {}]
    assert parsed.text.count(EVIL) >= 5  # title, subject, tables, config
    attributes = {key for _, found in parsed.tags for key in found}
    assert not any(key.startswith("on") for key in attributes)


@pytest.mark.usefixtures("undrawn")
def test_names_that_are_not_utf8_are_escaped(tmp_path: Path) -> None:
    """Python decodes the other bytes of a file's name to surrogates."""
    odd = "n\udcffn"
    folder = make_run(tmp_path / odd, task=odd, metric=odd, changes={"model": {odd: odd}})
    files = write_report([folder])
    for path in (files.page, files.tables):
        assert "n\\udcffn" in path.read_text()


def test_the_page_holds_its_pictures_and_fetches_nothing(tmp_path: Path) -> None:
    runs = [load_run(make_run(tmp_path / f"r{seed}", seed=seed)) for seed in range(2)]
    write_page(runs, tmp_path / "page.html", b"one", b"two")
    page = (tmp_path / "page.html").read_text()
    parsed = Tags(page)
    sources = [found["src"] for tag, found in parsed.tags if tag == "img"]
    assert sources == [f"data:image/png;base64,{data}" for data in ("b25l", "dHdv")]
    # The only address is the name of SVG.
    assert set(re.findall(r"https?:[^\"]*", page)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"url\(|@import|href=|fetch\(|innerHTML", page)
    assert "prefers-color-scheme: dark" in page
    assert "@media print" in page
    assert [tag for tag, _ in parsed.tags].count("details") == 3
    for text in ("means of 2 seeds", "Where the figures come from", "abc123", "train.seed=1"):
        assert text in parsed.text


def test_only_the_page_s_own_script_may_run(tmp_path: Path) -> None:
    write_page([load_run(make_run(tmp_path / "r"))], tmp_path / "page.html", b"one", b"two")
    page = (tmp_path / "page.html").read_text()
    script = page[page.rindex("<script>") + len("<script>") : page.rindex("</script>")]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'\"" in page


def test_report_of_one_run_is_written_into_its_folder(tmp_path: Path) -> None:
    files = write_report([make_run(tmp_path / "r")])
    assert files.page == tmp_path / "r" / "report" / "index.html"
    parts = (files.page, files.profile, files.saturation, files.training, files.tables)
    assert all(part.stat().st_size > 500 for part in parts)
    assert files.profile.read_bytes().startswith(b"\x89PNG")
    assert "10.0× smaller at 99.96% accuracy" in files.page.read_text()
    assert "| 1 | — | — |" in files.tables.read_text()


@pytest.mark.usefixtures("undrawn")
def test_the_common_folder_is_named_as_the_runs_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert common_folder([Path("runs/a"), Path("runs/b/c")]) == Path("runs")
    assert common_folder([tmp_path / "runs/a", Path("runs/b")]) == tmp_path / "runs"
    assert common_folder([Path("../a"), Path("b")]) == tmp_path.parent


def test_report_of_seeds_is_written_into_their_common_folder(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / "sweep" / f"r{seed}", seed=seed) for seed in range(2)]
    files = write_report(folders)
    assert files.page.parent == tmp_path / "sweep" / "report"
    text = files.tables.read_text()
    assert "mean" in text
    assert "### Saturation" in text
    # The folder that a sweep made stands for its runs.
    assert write_report([tmp_path / "sweep"]) == files
    assert files.tables.read_text() == text


@pytest.mark.usefixtures("undrawn")
def test_channels_next_to_be_removed_are_listed_where_the_summary_has_them(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / "old"), make_run(tmp_path / "new", seed=1, next_to_go=NEXT)]
    files = write_report(folders)
    for text in (files.page.read_text(), files.tables.read_text()):
        assert "Next to be removed, seed 1" in text
        assert "Next to be removed, seed 0" not in text


@pytest.mark.usefixtures("undrawn")
def test_report_of_a_run_in_progress_without_an_event(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r", rows=3, events=[], finished=False)
    files = write_report([folder], tmp_path / "elsewhere")
    assert files.page.parent == tmp_path / "elsewhere"
    assert "Not finished: step 30 of at most 100." in files.page.read_text()


@pytest.mark.parametrize(
    ("target", "frozen"), [({"hold": "final"}, False), ({"hold": "pressed"}, True), ({}, True)]
)
def test_only_a_structure_that_is_frozen_is_called_so(
    target: dict[str, str], frozen: bool, tmp_path: Path
) -> None:
    """A target of the final model is pressed to the last step."""
    files = write_report([make_run(tmp_path / "run", changes={"target": target})])
    page = files.page.read_text()
    assert ("Dashed: cooldown starts and the structure is frozen. Press" in page) is frozen
    assert ("Dashed: cooldown starts. Press" in page) is not frozen


def test_the_page_explains_what_it_shows(tmp_path: Path) -> None:
    def page_of(run: Path) -> str:
        write_page([load_run(run)], tmp_path / "page.html", b"one", b"two")
        return " ".join((tmp_path / "page.html").read_text().split())

    rollback, absent = "or came back where they are orange", "an empty cell: the run began without"
    plain = page_of(make_run(tmp_path / "plain"))
    assert rollback not in plain
    assert absent not in plain
    back = event(50, 100.0, 1000.0, {}, [], initial_widths(2)) | {"returned_to": 10}
    assert rollback in page_of(make_run(tmp_path / "back", events=[*two_drops(2, 0), back]))
    # As the structure of a finished run that is trained again: its removed operators never were.
    run = make_run(tmp_path / "retrained", events=[])
    initial = json.loads((run / "initial.json").read_text())
    initial["widths"] = final_widths(2, {}, removed=["mlp_1"])
    (run / "initial.json").write_text(json.dumps(initial))
    assert absent in page_of(run)


@pytest.mark.usefixtures("undrawn")
def test_a_run_that_stopped_early_is_at_the_step_of_its_checkpoint(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", rows=0, events=[], finished=False)
    (run / "checkpoints" / "step-00000007").mkdir(parents=True)
    page = write_report([run]).page.read_text()
    assert "Not finished: step 7 of at most 100." in page
    assert "No logging interval has ended yet" in page
    logged = make_run(tmp_path / "logged", rows=1, finished=False)
    assert "No logging interval" not in write_report([logged]).page.read_text()


def test_nobody_is_advised_to_widen_a_pretrained_model(tmp_path: Path) -> None:
    fresh = write_report([make_run(tmp_path / "fresh")]).page.read_text()
    assert "may need a larger initial width" in fresh
    given = make_run(tmp_path / "run", changes={"model": {"from": "base"}})
    page = write_report([given]).page.read_text()
    assert "larger initial width" not in page
    assert "The original uses nearly all of an axis at its ceiling" in page


def test_a_folder_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.write_text("")
    with pytest.raises(UserError, match=r"the folder '.*file' for the report cannot be created"):
        write_report([make_run(tmp_path / "r")], taken)


def test_the_report_reads_run_folders_only() -> None:
    allowed = {
        f"gaugelasso.{name}"
        for name in (
            "errors",
            "runs.command",
            "runs.folder",
            "runs.reading",
            "runs.rotation",
            "runs.writing",
            "runs.step_time",
            "runs.targets",
            "runs.training_work",
            "runs.units",
            "files.untrusted",
        )
    }
    for path in Path(gaugelasso.report.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            found = [node.module] if isinstance(node, ast.ImportFrom) else []
            found += [a.name for a in node.names] if isinstance(node, ast.Import) else []
            for module in filter(None, found):
                assert module.split(".")[0] != "torch", path
                ours = module.startswith("gaugelasso") and not module.startswith(
                    "gaugelasso.report"
                )
                assert not ours or module in allowed, f"{path.name} imports {module}"
