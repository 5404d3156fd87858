"""Small runs of every method: what `compare` writes of them is what `make tables` reads."""

import contextlib
import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from benchmarks.tables import build

from gaugelasso.baselines.cofi import parameters
from gaugelasso.cli import app, comparisons, controls
from gaugelasso.compress.result import TargetMissed
from gaugelasso.errors import UserError
from gaugelasso.models import Transformer
from gaugelasso.report.comparable import load_runs
from gaugelasso.report.compare import Comparison, compare, compare_table
from gaugelasso.report.compare_results import compare_results
from gaugelasso.report.results_schema import check_results
from gaugelasso.runs.checkpoint import load_model
from tests.baselines.in_process import train_here
from tests.command import Command, assert_user_error
from tests.report.test_paper_tables import line_of
from tests.tiny import write_tiny
from tests.tiny_runs import contents, read

ROOT = Path(__file__).parents[2]
RESULTS = Path("results/controls/retrieval.json")
WITHOUT_PRESSURE = (
    "compress.solver=fixed", "compress.rho=0", "target.loss=1e30", "train.steps=20",
)  # fmt: skip
FAMILIES = {
    "compression", "exchange", "full", "uniform", "from scratch", "post-hoc", "cofi",
    "cofi-parameters", "torch-pruning-magnitude",
}  # fmt: skip


def train(config: Path, out: Path, *changes: str) -> Path:
    sets = [word for change in changes for word in ("--set", change)]
    app(["train", str(config), "--out", str(out), *sets], standalone_mode=False)
    return out


def rival(command: str, full: Path, out: Path, **options: object) -> Path:
    words = [word for name, v in options.items() for word in (f"--{name.replace('_', '-')}", v)]
    with contextlib.suppress(TargetMissed):
        app([command, str(full), "--out", str(out), *map(str, words)], standalone_mode=False)
    return out


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each method, with one run or two seeds of it."""
    root = tmp_path_factory.mktemp("controls")
    config, runs = write_tiny(root), root / "runs"
    train(config, runs / "main" / "seed3")
    train(config, runs / "exchange" / "seed3", "compress.exchange=10")
    narrow = ("model.width=4", "model.d_f=4")
    train(config, runs / "uniform" / "seed3", *WITHOUT_PRESSURE, *narrow)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(controls, "run_sweep", train_here)
        words = ["retrain", str(runs / "main" / "seed3"), "--out", str(runs / "scratch")]
        app(words, standalone_mode=False)
    phases = {"warmup": 4, "prune": 12, "finetune": 8}
    for seed in (3, 4):
        full = train(config, runs / "full" / f"seed{seed}", *WITHOUT_PRESSURE, f"train.seed={seed}")
        half = 0.5 * read(full / "summary.json")["fma_final"]
        out = runs / "post-hoc" / f"seed{seed}"
        rival("prune", full, out, fma=half, rounds=2, corrective=3, finetune=16)
    rival("cofi", full, runs / "cofi" / "seed4", fma=half, **phases)
    rival("cofi", full, runs / "few" / "seed4", parameters=12, **phases)
    out = runs / "magnitude" / "seed4"
    rival("torch-pruning", full, out, fma=half, rounds=2, corrective=3, finetune=16)
    return runs


@pytest.fixture(scope="module")
def found(runs: Path) -> Comparison:
    return compare(load_runs([runs]))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A copy of the results, to change."""
    shutil.copytree(ROOT / "results", tmp_path / "results")
    shutil.rmtree(tmp_path / "results" / "controls", ignore_errors=True)
    return tmp_path


def result(found: Comparison, family: str, seed: int = 3) -> dict[str, Any]:
    rows = compare_results(found)["runs"]
    return next(row for row in rows if (row["family"], row["seed"]) == (family, seed))


# --- the file ------------------------------------------------------------------------------


def test_every_method_has_its_name_and_seeds(found: Comparison) -> None:
    assert {*found.methods} == {*found.families.values()} == FAMILIES
    seeds = {name: [one.run.seed for one in members] for name, members in found.methods.items()}
    assert {name for name, each in seeds.items() if each == [3, 4]} == {"full", "post-hoc"}


def test_a_run_has_all_that_tables_need(found: Comparison) -> None:
    data = compare_results(found)
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert check_results(RESULTS, data) is data
    for row in data["runs"]:
        summary = read(Path(row["folder"]) / "summary.json")
        for key in ("seed", "steps", "fma_initial", "fma_final", "loss", "wall_s"):
            assert row[key] == summary[key]
        assert row["training_work"] == summary["training_work"]
        assert row["selection_loss"] == summary["selection_loss"]
        assert row["training_fma"] == summary["training_work"]["total"]
        assert row["metric"] == summary["metric"]["value"]
        assert row["structure"] == summary["structure"]


def test_parameters_are_those_that_cofi_counts(found: Comparison) -> None:
    rows = compare_results(found)["runs"]
    for row in rows:
        model = load_model(Path(row["folder"]))
        assert isinstance(model, Transformer)
        assert row["parameters_without_embedding"] == parameters(model)
        assert row["parameters_without_embedding"] < row["parameters_final"]
    few, full = (result(found, family, 4) for family in ("cofi-parameters", "full"))
    assert few["cofi"]["reached"] == few["parameters_without_embedding"]
    assert few["parameters_without_embedding_initial"] == full["parameters_without_embedding"]


def test_a_run_says_whether_it_holds_its_target(found: Comparison) -> None:
    """One parameter is out of reach, though the config of such a run names a loss of 1e30."""
    assert result(found, "cofi-parameters", 4)["held"] is False
    assert found.missed("cofi-parameters") == "1 of 1 missed"
    assert result(found, "post-hoc")["held"] is True
    assert found.missed("post-hoc") == ""
    for family in ("full", "uniform", "from scratch"):
        assert result(found, family)["held"] is None
    table = compare_table(found)
    place = table.headers.index("target")
    cells = {row[0]: row[place] for row in table.rows if row[0]}
    assert cells.items() >= {
        "cofi-parameters": "missed (parameters)", "post-hoc": "2 of 2 held (work)", "full": "—",
    }.items()  # fmt: skip


def test_methods_have_their_conditions(found: Comparison) -> None:
    methods = {each["method"]: each["conditions"] for each in compare_results(found)["methods"]}
    assert methods["exchange"]["compress.exchange"] == 10
    assert methods["cofi-parameters"]["objective"] == "parameters"
    assert methods["post-hoc"]["rounds"] == 2
    assert methods["post-hoc"]["source.steps"] == 20
    assert not {"rounds_made", "train.steps", "target.fma"} & methods["post-hoc"].keys()


def test_options_make_methods_of_their_own(runs: Path, tmp_path: Path) -> None:
    """Runs that differ in a plan alone are not averaged, nor refused as equal seeds."""
    full = runs / "full" / "seed4"
    half = 0.5 * read(full / "summary.json")["fma_final"]
    other = tmp_path / "other"
    rival("prune", full, other, fma=half, rounds=3, corrective=3, finetune=16)
    phases = {"warmup": 4, "prune": 12, "finetune": 8, "distill": 0.25}
    masks = rival("cofi", full, tmp_path / "masks", fma=half, **phases)
    both = compare(load_runs([runs / "post-hoc", other, runs / "cofi", masks]))
    assert {name: len(members) for name, members in both.methods.items()} == {
        "post-hoc (rounds = 2)": 2, "post-hoc (rounds = 3)": 1,
        "cofi (distill = 0.5)": 1, "cofi (distill = 0.25)": 1,
    }  # fmt: skip
    assert {*both.families.values()} == {"post-hoc", "cofi"}


def test_another_amount_of_evaluation_is_refused(
    gaugelasso: Command, runs: Path, tmp_path: Path
) -> None:
    more = train(write_tiny(tmp_path), tmp_path / "more", "train.final_batches=5")
    before = contents(tmp_path)
    answer = gaugelasso("compare", runs / "full", more, "--out", tmp_path / "out")
    assert_user_error(answer, "one is evaluated on 8 sequences, the other on 20")
    assert contents(tmp_path) == before


def test_a_results_file_of_another_task_is_not_written(
    gaugelasso: Command, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "controls" / "charlm.json"
    words = ("compare", runs / "full", runs / "post-hoc", "--out", tmp_path / "out")
    # It is known before the minutes that measuring takes.
    monkeypatch.setattr(comparisons, "_measure", lambda *_: pytest.fail("measured first"))
    answer = gaugelasso(*words, "--latency", "--results", path)
    assert_user_error(answer, "its runs are of task 'retrieval'; write it to retrieval.json")
    assert contents(tmp_path) == {}


# --- the tables ----------------------------------------------------------------------------


def test_tables_read_what_the_command_writes(gaugelasso: Command, runs: Path, root: Path) -> None:
    words = ("--results", root / RESULTS, "--out", root / "out")
    assert gaugelasso("compare", runs, *words)[0] == 0
    rows = read(root / RESULTS)["runs"]
    text = build(root)
    for name, family in (
        ("retrieval, post-hoc", "post-hoc"),
        ("retrieval, uniform of equal FMA", "uniform"),
        ("retrieval, from scratch", "from scratch"),
        ("retrieval, CoFi", "cofi"),
        ("retrieval, Torch-Pruning by magnitude", "torch-pruning-magnitude"),
    ):
        of = [row for row in rows if row["family"] == family]
        own = name == "retrieval, from scratch"  # the paper has this row, so ours is the second
        table = text.partition("## `tab:posthoc`")[2]
        line = line_of(text, "tab:posthoc", name) if own else _line(table, f"| {name} |")
        cells = [cell.strip() for cell in line.split("|")[3:]]
        assert cells[0] == str(len(of))
        steps = [row["steps"] + row.get("source", {"steps": 0})["steps"] for row in of]
        assert cells[1].startswith(f"{sum(steps) / len(of):,.0f}")
        assert cells[2].startswith(f"{sum(row['fma_final'] for row in of) / len(of):.3g}")
        assert cells[3].startswith(f"{sum(row['metric'] for row in of) / len(of):.5f}")
        assert f"[retrieval.json](controls/retrieval.json), {family}" in line
    exchange = line_of(text, "tab:retriever-ablation", "baseline (exchange)")
    assert "[retrieval.json](controls/retrieval.json), exchange" in exchange
    # The commands of all runs, a line each, and that of the comparison.
    _, _, after = text.partition("### results/controls/retrieval.json\n\n```sh\n")
    commands = after.partition("```")[0].splitlines()
    assert commands[-1] == shlex.join(["gaugelasso", "compare", str(runs), *map(str, words)])
    # Group norm was not run, and the page says so.
    assert "torch-pruning-group-norm" in _line(text, "| retrieval, Torch-Pruning by group norm |")
    assert "Missing: results/controls/retrieval.json" in text


def _line(text: str, start: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(start))


def test_the_state_of_cofi_is_in_its_tables(found: Comparison, root: Path) -> None:
    """The character LM has these tables; runs of another task stand for its."""
    path = root / "results" / "controls" / "charlm.json"
    path.parent.mkdir()
    path.write_text(json.dumps(compare_results(found) | {"task": "charlm"}))
    text, few = build(root), result(found, "cofi-parameters", 4)
    line = line_of(text, "tab:cofi", "CoFi, parameter target")
    cells = [cell.strip() for cell in line.split("|")[3:]]
    whole = few["parameters_without_embedding_initial"]
    assert cells[0] == f"{whole / 12:.1f}×"
    assert cells[1].startswith(f"{whole / few['cofi']['reached']:.2f}")
    assert cells[3] == f"{few['parameters_without_embedding']:.3g}"
    assert cells[5].endswith("of 1")
    assert "1 of 1 missed the target" in cells[6]
    state = line_of(text, "tab:cofi_controller", "CoFi, parameter target")
    masks = [f"{mean:.3f}" for mean in few["cofi"]["masks"].values()]
    assert [cell.strip() for cell in state.split("|")[3:8]] == masks
    teacher = line_of(text, "tab:cofi", "teacher, no pruning")
    assert [cell.strip() for cell in teacher.split("|")[3:5]] == ["—", "1.00× ± 0.00×"]


def write(root: Path, data: dict[str, Any]) -> None:
    (root / RESULTS).parent.mkdir(exist_ok=True)
    (root / RESULTS).write_text(json.dumps(data))


def test_a_row_that_fits_two_methods_is_refused(found: Comparison, root: Path) -> None:
    data = compare_results(found)
    for each in (*data["runs"], *data["methods"]):
        if each["method"] == "cofi":
            each["family"] = "post-hoc"
    write(root, data)
    with pytest.raises(UserError, match=r"has 2 methods that are 'post-hoc': 'cofi', 'post-hoc'"):
        build(root)
    path = root / "results" / "paper.json"
    paper = read(path)
    table = next(each for each in paper["tables"] if each["label"] == "tab:posthoc")
    row = next(row for row in table["rows"] if row["name"] == "retrieval, post-hoc")
    row["ours"]["where"] = {"rounds": 2}
    path.write_text(json.dumps(paper))
    assert "post-hoc, rounds = 2; [command]" in _line(build(root), "| retrieval, post-hoc |")
    row["ours"]["where"] = {"round": 2}
    path.write_text(json.dumps(paper))
    with pytest.raises(UserError, match="'post-hoc' has no condition 'round'"):
        build(root)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("loss", "x", r"runs\[0\] of 'results/controls/retrieval\.json': 'loss' is not a finite"),
        ("seed", None, r"runs\[0\] of .*: 'seed' is not a whole number"),
        ("wall_s", ..., r"runs\[0\] of .*: key 'wall_s' is missing"),
        ("held", "yes", "'held' is not true, false or null"),
        ("method", "another", "method 'another' is not one of 'methods'"),
    ],
)
def test_a_damaged_run_is_refused(
    found: Comparison, root: Path, key: str, value: Any, message: str
) -> None:
    data = compare_results(found)
    data["runs"][0][key] = value
    if value is ...:
        del data["runs"][0][key]
    write(root, data)
    with pytest.raises(UserError, match=message):
        build(root)


def test_a_file_of_another_task_or_kind_is_refused(found: Comparison, root: Path) -> None:
    data = compare_results(found)
    write(root, data | {"task": "ff31"})
    with pytest.raises(UserError, match=r"its runs are of task 'ff31'; write it to ff31\.json"):
        build(root)
    write(root, data | {"runs": [*data["runs"], data["runs"][0]]})
    with pytest.raises(UserError, match=r"a second run of method '.*' with seed"):
        build(root)
    write(root, {key: value for key, value in data.items() if key != "runs"})
    with pytest.raises(UserError, match="key 'runs' is missing"):
        build(root)
    (root / RESULTS).write_text("{")
    with pytest.raises(UserError, match="not a readable JSON file"):
        build(root)
