"""Polynomial division: draws, metrics, and what `show` prints."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gaugelasso import load_model
from gaugelasso.axes import named_tensors
from gaugelasso.cli.show import readable, show_divisions
from gaugelasso.compress.pricing import ACCOUNTINGS, total_fma
from gaugelasso.config import Config, load_config
from gaugelasso.errors import UserError
from gaugelasso.models import Transformer
from gaugelasso.report.data import load_run
from gaugelasso.report.results import collect_results
from gaugelasso.report.tables import before_after
from gaugelasso.tasks import FF31, SELECTION, TASKS, TEST, Draw, WithFigures
from gaugelasso.training.evaluation import final_figures
from gaugelasso.training.trainer import Trainer
from tests.command import Command, assert_user_error
from tests.tasks.divisions import HELD_OUT, PAPER, ROOT, SMALL
from tests.tiny_runs import finished


def oracle(task: FF31, rows: Tensor) -> Tensor:
    """Outputs that predict every next word of the rows."""
    following = rows.roll(-1, dims=1)
    return 50.0 * torch.nn.functional.one_hot(following, task.outputs).float()


# --- draws ----------------------------------------------------------------------------


def test_a_tenth_of_training_and_nothing_held_out_is_drills() -> None:
    pad = PAPER.grammar.vocabulary.index("pad")
    batches = [PAPER.batch(128, Draw(0, k), "cpu")[0] for k in range(30)]
    share = (torch.cat(batches)[:, 0] == pad).double().mean()
    assert share == pytest.approx(0.1, abs=0.02)
    for k in range(5):
        assert not (PAPER.batch(128, Draw(0, k, SELECTION), "cpu")[0][:, 0] == pad).any()
        assert not (PAPER.batch(128, Draw(0, k, TEST), "cpu")[0][:, 0] == pad).any()
    assert not (FF31(drills=0.0).batch(128, Draw(0), "cpu")[0][:, 0] == pad).any()


def test_a_batch_depends_on_its_draw_alone() -> None:
    first = SMALL.batch(8, Draw(5), "cpu")
    torch.manual_seed(99)
    SMALL.batch(8, Draw(6), "cpu")
    state = torch.random.get_rng_state()
    again = SMALL.batch(8, Draw(5), "cpu")
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], SMALL.batch(8, Draw(6), "cpu")[0])


# --- loss, metric, figures ------------------------------------------------------------


def test_loss_and_metric_of_an_oracle_and_of_a_guess() -> None:
    tokens, targets = SMALL.batch(16, HELD_OUT, "cpu")
    outputs = oracle(SMALL, tokens)
    assert float(SMALL.loss(outputs, targets)) == pytest.approx(0, abs=1e-6)
    assert float(SMALL.metric(outputs, targets)) == 1.0
    guess = torch.zeros_like(outputs)
    assert float(SMALL.loss(guess, targets)) == pytest.approx(math.log(18), rel=1e-5)
    assert float(SMALL.metric(guess, targets)) == 0.0
    # One wrong supervised word makes a sequence wrong; an unsupervised one does not.
    outputs[:4, -2] *= -1
    outputs[:, 0] *= -1
    assert float(SMALL.metric(outputs, targets)) == 0.75


@pytest.mark.parametrize(
    ("slip", "exact", "answer"), [(None, 1.0, 1.0), (40, 0.5, 1.0), (-2, 0.5, 0.5)]
)
def test_free_running_figures(slip: int | None, exact: float, answer: float) -> None:
    tokens = SMALL.batch(8, HELD_OUT, "cpu")[0]
    if slip is not None:
        tokens[::2, slip] = SMALL.grammar.vocabulary.index("pad")
    calls: list[Tensor] = []

    def predict(inputs: Tensor) -> Tensor:
        calls.append(inputs.clone())
        return oracle(SMALL, tokens)

    figures = SMALL.final_figures(predict, 8, [HELD_OUT], "cpu")
    assert figures["free-running exact match"] == exact
    assert figures["free-running answer accuracy"] == answer
    wrong = 0 if slip is None else 0.5 / 168
    assert figures["token accuracy"] == pytest.approx(1 - wrong)
    # In free-running mode the model gets the problem, and then its own words.
    problem = SMALL.grammar.problem
    first, last = calls[1], calls[-1]
    assert torch.equal(first[:, :problem], tokens[:, :problem])
    assert (first[:, problem:] == SMALL.grammar.vocabulary.index("pad")).all()
    assert torch.equal(last[:, :-1], tokens[:, :-1])


# --- configs and runs -----------------------------------------------------------------


@pytest.mark.parametrize("name", ["main", "loose", "slow"])
def test_the_paper_s_work(name: str) -> None:
    config = load_config(ROOT / "configs" / "ff31" / f"{name}.toml")
    assert config.compress.accounting == "paper"
    with torch.device("meta"):
        model = Transformer(config.model.spec(config.task))
    accounting = ACCOUNTINGS[config.compress.accounting]
    assert total_fma(model.axis_table(), accounting, named_tensors(model)) == 13_179_840


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"modulus": 9}, r"task\.modulus = 9: must be a prime"),
        ({"modulus": 1}, r"task\.modulus = 1"),
        ({"modulus": 1009}, r"at most 997"),
        ({"modulus": 3, "degree": 3}, r"task\.degree = 3: must be 1 to modulus - 1 = 2"),
        ({"degree": 0}, r"task\.degree = 0"),
        ({"drills": 1.0}, r"task\.drills = 1\.0"),
        ({"drills": -0.1}, r"task\.drills = -0\.1"),
    ],
)
def test_invalid_settings_are_rejected(keys: dict[str, float], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        FF31(**keys)  # type: ignore[arg-type]


# --- a run, and the command show ----------------------------------------------------


TINY = """
[task]
name = "ff31"
modulus = 3
degree = 1

[model]
width = 8
layers = 1
heads = 2
d_k = 4
d_v = 4
d_f = 8

[target]
loss = 2.3

[compress]
drop_tolerance = 1e9
lr = 0.04
interval = 5
trust = 4.0

[train]
steps = 40
warmup = 4
cooldown = 10
batch = 4
eval_batches = 1
final_batches = 2
device = "cpu"
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("division")
    (folder / "tiny.toml").write_text(TINY)
    Trainer(load_config(folder / "tiny.toml"), folder / "run").run()
    return folder / "run"


FIGURES = ["token accuracy", "free-running exact match", "free-running answer accuracy"]


def test_figures_are_in_summary_report_and_results(run: Path) -> None:
    loaded = load_run(run)
    assert loaded.summary is not None
    assert loaded.summary["fma_final"] < loaded.summary["fma_initial"]
    figures = loaded.summary["figures"]
    assert list(figures) == FIGURES
    assert all(0 <= value <= 1 for value in figures.values())
    rows = {row[0]: row[2] for row in before_after([loaded]).rows}
    assert rows["exact match"] == "0.00%"
    assert rows["token accuracy"] == f"{figures['token accuracy']:.2%}"
    (result,) = collect_results([run])["runs"]
    assert result["figures"] == figures
    config = Config.from_dict(loaded.config)
    again = final_figures(load_model(run), config, config.train.final_batches, "cpu", TEST)
    assert again == pytest.approx(figures)


def test_sampled_tasks_have_no_whole_figures(
    run: Path, tmp_path: Path, gaugelasso: Command
) -> None:
    for folder, task in ((run, "ff31"), (finished(tmp_path), "retrieval")):
        expected = f"--whole: the test data of task '{task}' are not finite; use --batches"
        assert_user_error(gaugelasso("eval", folder, "--whole", "--device", "cpu"), expected)


def test_a_task_without_figures_has_none(tmp_path: Path) -> None:
    assert not isinstance(TASKS["retrieval"](), WithFigures)
    summary = json.loads((finished(tmp_path) / "summary.json").read_text())
    assert summary["figures"] == {}


def test_show_marks_an_untrained_model_s_faults(run: Path) -> None:
    lines = list(show_divisions(run, 2, seed=5, device="cpu"))
    steps = ["divide", "multiply", "subtract", "accumulate"]
    assert [line for line in lines if line.startswith("problem 1, over Z/3: (")]
    for step in steps:
        assert sum(f"round 1: {step}" in line for line in lines if line[2:3] in "✓✗") == 2
    assert any(line.startswith("  ✗ answer") for line in lines)
    assert any(line.strip().startswith("word ") for line in lines)
    assert lines[-1] == "0 of 2 without a fault"
    assert lines == list(show_divisions(run, 2, seed=5, device="cpu"))
    assert lines[0] != next(show_divisions(run, 1, seed=6, device="cpu"))


def test_show_finds_no_fault_in_correct_solutions(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FF31, "solve", lambda task, predict, tokens: tokens)
    lines = list(show_divisions(run, 3, seed=0, device="cpu"))
    assert lines[-1] == "3 of 3 without a fault"
    assert not any("✗" in line for line in lines)


def test_show_on_the_command_line(run: Path, tmp_path: Path, gaugelasso: Command) -> None:
    code, out, _ = gaugelasso("show", run, "--problems", 2, "--seed", 3, "--device", "cpu")
    assert code == 0
    assert "problem 2, over Z/3" in out
    answer = gaugelasso("show", finished(tmp_path))
    assert_user_error(answer, "is a run of the task 'retrieval'; show needs a run of 'ff31'")
    assert_user_error(gaugelasso("show", tmp_path / "nowhere"), "no such folder")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("3 x ^ 2 + 10 x ^ 1 + 0 x ^ 0 ;", "3x^2 + 10x + 0"),
        ("9 x ^ 1 / 2 x ^ 1 ; 9 * 16 = 20 ; 20 x ^ 0 ;", "9x / 2x; 9 * 16 = 20; 20"),
        (": 4 x ^ 10 + 1 x ^ 1 ;", "4x^10 + 1x"),
        ("= 4 x ^ 0 rem 7 x ^ 0 end", "= 4 rem 7 end"),
        ("x x ; inv ^", "xx; inv^"),
    ],
)
def test_words_as_mathematics(words: str, expected: str) -> None:
    assert readable(words.split()) == expected
