"""results/README.md is what its JSON files give, and says what was not run."""

import json
import re
import shlex
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import typer
from benchmarks import controls, tables, wallclock
from benchmarks.control_arms import TASKS
from benchmarks.planned import METHODS, commands_of, seeds_text
from benchmarks.table_cells import CELLS, compression_of, outcome_of
from benchmarks.tables import PAPER, README, build, layer_rows, rows_of

from gaugelasso.cli import app
from gaugelasso.errors import UserError

ROOT = Path(__file__).parents[2]
DATA = json.loads((ROOT / PAPER).read_text(encoding="utf-8"))


def test_the_page_is_what_the_results_give() -> None:
    text = (ROOT / README).read_text(encoding="utf-8")
    assert text == build(), "results/README.md differs from the JSON files: run `make tables`"


def test_every_link_leads_somewhere() -> None:
    text = (ROOT / README).read_text(encoding="utf-8")
    anchors = set(re.findall(r'<a id="([^"]+)">', text))
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith("#"):
            assert target[1:] in anchors
        else:
            assert (ROOT / "results" / target.partition("#")[0]).exists(), target


def test_rows_have_the_columns_of_their_table() -> None:
    for table in DATA["tables"]:
        for row in table["rows"]:
            assert len(row["paper"]) == len(table["columns"]), row["name"]
        for _, kind in table["columns"]:
            assert kind.partition("@")[0] in {*CELLS, "share", "converged", "quality"}


def test_missing_files_have_the_commands_that_write_them() -> None:
    """The commands exist, and so do their configs and arms; a control writes the very file."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    files = {row["ours"]["file"] for _, row in rows_of(DATA)}
    assert {name for name in files if not (ROOT / name).exists()} <= DATA["planned"].keys() <= files
    for name, planned in DATA["planned"].items():
        for line in commands_of(planned, None, missing=True):
            words = shlex.split(line, comments=True)
            if words[:3] == ["python", "-m", "benchmarks.controls"]:
                given = controls.parser_of().parse_args(words[3:])
                assert str(given.results) == name
                arms = TASKS[given.task](None)
                assert [METHODS.get(arm, arm) for arm in given.arms] == [
                    arms.method(arm) for arm in given.arms
                ]
            elif words[:3] == ["python", "-m", "benchmarks.wallclock"]:
                assert words[words.index("--data") + 1] == name
            elif words:
                made = commands[words[1]].make_context(words[1], words[2:]).params
                assert (ROOT / made["config"]).exists()


def test_every_control_that_a_row_waits_for_is_planned() -> None:
    for _, row in rows_of(DATA):
        ours = row["ours"]
        for each in (ours, ours.get("more", {})):
            name = each.get("file", "")
            if "method" not in each or ((ROOT / name).exists() and _has(name, each["method"])):
                continue
            made = {METHODS.get(arm, arm) for line in DATA["planned"][name]["runs"]
                    for arm in line["arms"]}  # fmt: skip
            # The full model is trained for those that start from it.
            assert each["method"] in made | {"full"}, row


def _has(name: str, method: str) -> bool:
    runs = json.loads((ROOT / name).read_text())["runs"]
    return any(run["method"] == method for run in runs)


def test_commands_name_only_what_a_file_lacks() -> None:
    runs = [
        {"arms": ["scratch", "cofi"], "seeds": [42, 43, 44], "jobs": 3, "takes": "1 minute"},
        {"arms": ["full"], "seeds": [42], "takes": "an hour"},
    ]
    planned = {"command": "python x", "runs": runs}
    assert commands_of(planned, None, missing=True) == [
        "# 1 minute", "python x --arms scratch cofi --seeds 42-44 --jobs 3",
        "# an hour", "python x --arms full --seeds 42",
    ]  # fmt: skip
    have = [("from scratch", 42), ("from scratch", 43), ("full", 42)]
    data = {"runs": [{"method": method, "seed": seed} for method, seed in have]}
    assert commands_of(planned, data, missing=False) == [
        "# 1 minute", "python x --arms scratch --seeds 44 --jobs 3",
        "# 1 minute", "python x --arms cofi --seeds 42-44 --jobs 3",
    ]  # fmt: skip
    assert commands_of(["a", "b"], None, missing=True) == ["a", "b"]
    assert commands_of(["a", "b"], data, missing=False) == []
    assert seeds_text([66, 54, 57, 56]) == "54,56-57,66"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A copy of the results, to change."""
    shutil.copytree(ROOT / "results", tmp_path / "results")
    (tmp_path / "benchmarks").mkdir()
    return tmp_path


def line_of(text: str, table: str, row: str) -> str:
    """Our line of a row, which follows the paper's."""
    _, _, rest = text.partition(f"## `{table}`")
    return next(after for line, after in pairwise(rest.splitlines()) if f"| {row} |" in line)


def test_a_changed_figure_changes_the_page(root: Path) -> None:
    path = root / "results" / "charlm" / "main.json"
    data = json.loads(path.read_text())
    data["runs"][0]["loss"] = 1.0
    path.write_text(json.dumps(data))
    line = line_of(build(root), "tab:text-transformer", "L* = ln 3, 12L, D = 576")
    assert "| 1 | 2.718 | 7.6M |" in line


def test_a_missing_file_is_not_run_and_a_new_one_fills_its_rows(root: Path) -> None:
    (root / "results" / "charlm" / "uniform.json").unlink()
    path = root / "results" / "controls" / "retrieval.json"
    path.parent.mkdir(exist_ok=True)
    run = {"method": "from scratch", "fma_final": 185e3, "loss": 0.01, "metric": 0.75,
           "training_fma": 1e9, "wall_s": 1.0}  # fmt: skip
    origin = {"command": "gaugelasso retrain x", "commit": "c", "hardware": "h", "date": "d"}
    runs = [run | {"seed": seed} for seed in (42, 43)]
    path.write_text(json.dumps({**origin, "runs": runs}))
    text = build(root)
    uniform = "baseline, uniform 6L, D = 288"
    assert line_of(text, "tab:text-transformer", uniform).startswith("|  | **ours** | not run |")
    scratch = line_of(text, "tab:posthoc", "retrieval, from scratch")
    assert scratch.startswith("|  | **ours** | 2 | — | 185k ± 0 | 0.75000 ± 0.00000 |")
    assert "[retrieval.json](controls/retrieval.json), from scratch" in scratch
    assert "gaugelasso retrain x" in text
    by_seed = line_of(text, "tab:population, retrieval and F31", "retrieval, from scratch")
    assert "| 0.75000 | 0.75000 | not run |" in by_seed


def test_outcomes_are_the_paper_s() -> None:
    assert outcome_of({"compression": 1.5, "metric": 1.0}) == "never compressed"
    assert outcome_of({"compression": 100.0, "metric": 0.99}) == "converged"
    assert outcome_of({"compression": 100.0, "metric": 0.98}) == "not converged"
    assert compression_of({"fma_initial": 10.0, "fma_final": 5.0}) == 2.0
    assert compression_of({"fma_final": 5.0}) is None


def test_a_figure_that_a_run_lacks_is_a_dash() -> None:
    """A run with the least that a results file must have."""
    run = {"seed": 1, "fma_final": 5.0, "loss": None, "metric": None, "training_fma": None,
           "wall_s": None, "ms": None}  # fmt: skip
    assert outcome_of(run) == "never compressed"
    cells = {name: cell([run]) for name, cell in CELLS.items()}
    known = {"runs": "1", "held": "0", "fma": "5", "fma_median": "5"}
    assert cells == dict.fromkeys(CELLS, "—") | known


def test_a_loss_of_all_held_out_data_is_the_mean_of_the_halves() -> None:
    # Early runs have one figure for all of them.
    runs = [{"loss": 1.2, "selection_loss": 1.0}, {"loss": 1.1}]
    assert CELLS["held_out_loss"](runs[:1]) == CELLS["held_out_loss"](runs[1:]) == "1.1"
    assert CELLS["perplexity"](runs[:1]) == CELLS["perplexity"](runs[1:]) == "3.004"
    assert CELLS["loss"](runs[:1]) == "1.2"


def change(root: Path, **ours: object) -> None:
    """Replace what the first row says of ours."""
    paper = json.loads((root / PAPER).read_text())
    paper["tables"][0]["rows"][0]["ours"] = ours
    (root / PAPER).write_text(json.dumps(paper))


def test_a_row_without_a_file_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for ours, message in (
        ({}, '\'tab:ff31, no penalty\' has no "file" in "ours"'),
        ({"file": "x", "metod": "full"}, "'tab:ff31, no penalty' has 'metod'; known are"),
        ({"file": "x", "more": {"fil": "y"}}, "'tab:ff31, no penalty' has 'fil' in \"more\""),
        ({"file": "x", "quality": "ppl"}, "'tab:ff31, no penalty' has the quality 'ppl'"),
    ):
        change(root, **ours)
        with pytest.raises(UserError, match=re.escape(message)):
            build(root)
    before = (root / README).read_bytes()
    monkeypatch.setattr(tables, "build", lambda: build(root))
    monkeypatch.setattr(tables, "ROOT", root)
    monkeypatch.setattr("sys.argv", ["tables"])
    with pytest.raises(SystemExit) as stopped:
        tables.main()
    assert stopped.value.code == 2
    assert (root / README).read_bytes() == before


def test_an_arm_that_is_missing_is_not_run(root: Path) -> None:
    """Not the runs of another arm, or of the whole file."""
    change(root, file="results/retrieval/ablation.json", arm="another")
    assert "| not run |" in line_of(build(root), "tab:ff31", "no penalty")


RUN = {"fma_final": 7e6, "fma_initial": 53e6, "metric": 1.5, "training_fma": 1e9, "wall_s": 1.0}
ORIGIN = {"command": "python x", "commit": "c", "hardware": "h", "date": "d"}


def test_further_seeds_of_another_file_are_in_the_row(root: Path) -> None:
    path = root / "results" / "controls" / "charlm.json"
    path.unlink(missing_ok=True)
    row = "L* = ln 3, 12L, D = 576"
    before = line_of(build(root), "tab:text-transformer", row)
    assert "4 of 5 seeds not run" in before
    # A seed that the main file has counts once.
    runs = [RUN | {"method": "compression", "seed": s, "loss": 1.0} for s in (42, 43, 44)]
    path.write_text(json.dumps({**ORIGIN, "runs": runs}))
    text = build(root)
    line = line_of(text, "tab:text-transformer", row)
    assert "2 of 5 seeds not run" in line
    links = "[main.json](charlm/main.json); [command](#results-charlm-main)"
    assert f"{links}; seeds 43-44 from [charlm.json]" in line
    assert "[charlm.json](controls/charlm.json), compression; [command]" in line
    assert "(a later commit)" in line
    by_seed = line_of(text, "tab:population, character LM", "L* = ln 3")
    assert "| 2.680 | 2.718 | 2.718 | not run | not run |" in by_seed
    # What is done is not planned any more.
    _, _, planned = text.partition("### Missing: results/controls/charlm.json")
    assert "--arms uniform --seeds 43" in planned
    assert "--arms compression uniform" not in planned
    (root / "results" / "charlm" / "main.json").unlink()
    line = line_of(build(root), "tab:text-transformer", row)
    assert "main.json" not in line
    assert "seeds 42-44 from [charlm.json]" in line


def test_the_planned_runs_fill_every_row(root: Path) -> None:
    """What the commands write is all that the tables wait for; nothing is planned afterwards."""
    timings = "benchmarks/nvidia-h200_2026-11-16.json"
    shutil.copy(ROOT / timings, root / timings)
    structure = {"layers": 24, "operators": []}
    for name, planned in DATA["planned"].items():
        path = root / name
        if not isinstance(planned, dict):
            times = {"step_ms": [2.0, 2.0], "fma_initial": 2.0, "fma_final": 1.0}
            curves = [{"task": task} | times for task in wallclock.ORDER]
            path.write_text(json.dumps({**ORIGIN, "curves": curves}))
            continue
        pairs = {(METHODS.get(arm, arm), seed) for line in planned["runs"]
                 for arm in [*line["arms"], "full"] for seed in line["seeds"]}  # fmt: skip
        known = json.loads(path.read_text())["runs"] if path.exists() else []
        pairs -= {(run["method"], run["seed"]) for run in known}
        made = [RUN | {"method": method, "seed": seed, "loss": 1.0, "structure": structure}
                for method, seed in pairs]  # fmt: skip
        path.write_text(json.dumps({**ORIGIN, "runs": [*known, *made]}))
    text = build(root)
    assert text.partition("## Not run yet")[2].lstrip().startswith("Every row has runs.")
    assert "expected in" not in text
    row = line_of(text, "tab:ff31_reliability, steps", "5e-4")
    assert "12 of 25" not in row
    assert "seeds 54,56-66 from [ff31.json](controls/ff31.json), compression-slow" in row


def test_step_times_come_from_runs_that_had_the_gpu_alone(root: Path) -> None:
    def line(text: str, shows: str) -> str:
        return next(each for each in text.splitlines() if f"step time and loss, {shows}" in each)

    text = build(root)
    assert "| not run |" in line(text, "retrieval")
    assert "its runs shared a GPU" in line(text, "retrieval")
    assert "Missing: results/controls/wallclock.json" in text
    times = [90.0, *[4.0] * 5, None, *[2.0] * 5]  # the first has the start of the run
    curve = {"task": "retrieval", "step_ms": times, "fma_initial": 10.0, "fma_final": 2.0}
    path = root / "results" / "controls" / "wallclock.json"
    path.write_text(json.dumps({**ORIGIN, "curves": [curve]}))
    text = build(root)
    assert "| 4.00 ms to 2.00 ms, 2.00× at 5.00× less work |" in line(text, "retrieval")
    assert "[wallclock.json](controls/wallclock.json)" in line(text, "retrieval")
    assert "shared" not in line(text, "retrieval")
    assert "| not run |" in line(text, "F31")
    for key, value, message in (
        ("curves", [curve | {"step_ms": "x"}], "'step_ms' is not a list of figures"),
        ("curves", {}, "key 'curves' is missing"),
        ("hardware", 3, "'hardware' is not a string"),
    ):
        path.write_text(json.dumps({**ORIGIN, "curves": [curve], key: value}))
        with pytest.raises(UserError, match=rf"wallclock\.json'.*{re.escape(message)}"):
            build(root)


def test_seeds_that_were_not_run_are_counted(root: Path) -> None:
    change(root, file="results/retrieval/population.json", seeds=25)
    assert line_of(build(root), "tab:ff31", "no penalty").endswith("; 5 of 25 seeds not run |")


def test_a_class_of_runs_is_counted_of_all(root: Path) -> None:
    path = root / "results" / "ff31" / "population.json"
    data = json.loads(path.read_text())
    data["runs"][0] |= {"metric": 0.5}
    path.write_text(json.dumps(data))
    text = build(root)
    assert "| 24/25 |" in line_of(text, "tab:ff31", "L* = 0.005, 70k steps")
    assert "| 1/25 |" in line_of(text, "tab:ff31_reliability", "1e-3: compressed, not converged")


def test_layers_are_the_widths_of_the_structure() -> None:
    attention = {"kind": "attention", "depth": 1, "reads": [1, 2], "writes": [3], "heads": 4,
                 "keys": 5, "values": 6}  # fmt: skip
    mlp = {"kind": "mlp", "depth": 0, "reads": [1], "writes": [2, 3, 4], "filters": 7}
    rows = layer_rows({"layers": 2, "operators": [attention, mlp]})
    assert rows == [[*"—————", "1", "7", "3"], ["2", "4", "5", "6", "1", *"———"]]
