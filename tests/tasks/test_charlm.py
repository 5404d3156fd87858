"""The character language model: windows, figures, its runs and commands."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gaugelasso.axes import named_tensors
from gaugelasso.compress.pricing import ACCOUNTINGS, total_fma
from gaugelasso.config import load_config
from gaugelasso.errors import UserError
from gaugelasso.models import Transformer
from gaugelasso.models.decoding import sample
from gaugelasso.report.data import load_run
from gaugelasso.report.results import collect_results
from gaugelasso.report.tables import before_after
from gaugelasso.runs.checkpoint import load_model
from gaugelasso.tasks import SELECTION, TASKS, TEST, TRAINING, CharLM, Draw
from gaugelasso.tasks.text import readable
from gaugelasso.training.evaluation import evaluate, predictor
from gaugelasso.training.trainer import Trainer
from tests.command import Command
from tests.tasks.prose import PROSE, write
from tests.tiny_runs import assert_same_run, contents, keep_images, read, stop_at

pytestmark = pytest.mark.usefixtures("own_cache")

CONFIGS = Path(__file__).parents[2] / "configs" / "charlm"
FIRST = ord("!")


def numbered(tmp_path: Path, size: int, length: int) -> CharLM:
    """Texts whose bytes encode their position: k mod 89 in training, 7 k mod 89 in validation."""
    train = write(tmp_path / "train.txt", bytes(FIRST + k % 89 for k in range(size)))
    valid = write(tmp_path / "valid.txt", bytes(FIRST + 7 * k % 89 for k in range(5 * length + 3)))
    return CharLM(path=str(train), valid=str(valid), length=length)


def starts(task: CharLM, size: int, index: int, run: int = 0) -> list[int]:
    tokens, targets = task.batch(size, Draw(run, index), "cpu")
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    return (tokens[:, 0] - FIRST).tolist()


# --- windows -------------------------------------------------------------------------


def test_an_epoch_reads_every_window_once(tmp_path: Path) -> None:
    length, size = 8, 88
    task = numbered(tmp_path, size, length)
    count = size // length - 1
    seen = [starts(task, 1, k)[0] for k in range(3 * count)]
    epochs = [seen[e * count : (e + 1) * count] for e in range(3)]
    offsets = [min(epoch) for epoch in epochs]
    for offset, epoch in zip(offsets, epochs, strict=True):
        assert 0 <= offset < length
        assert sorted(epoch) == [offset + length * k for k in range(count)]
        assert epoch != sorted(epoch)
    assert len(set(offsets)) > 1
    assert len({tuple((s - o) for s in e) for o, e in zip(offsets, epochs, strict=True)}) == 3


def test_a_batch_is_a_function_of_run_and_index(tmp_path: Path) -> None:
    task = numbered(tmp_path, 88, 8)
    one_by_one = [starts(task, 1, k)[0] for k in range(60)]
    for size in (4, 20):  # within an epoch, and across two
        again = [s for k in reversed(range(60 // size)) for s in reversed(starts(task, size, k))]
        assert again[::-1] == one_by_one
    assert [starts(task, 1, k, run=1)[0] for k in range(60)] != one_by_one


@pytest.mark.parametrize("size", [9, 10, 15, 16, 17, 24, 25])
def test_short_texts_are_read_to_their_end(tmp_path: Path, size: int) -> None:
    task = numbered(tmp_path, size, 8)
    seen = {s for k in range(40) for s in starts(task, 4, k)}
    assert min(seen) == 0
    assert max(seen) == size - 9


@pytest.mark.parametrize(("stream", "start"), [(SELECTION, 0), (TEST, 24)])
def test_held_out_windows_are_in_order(tmp_path: Path, stream: int, start: int) -> None:
    """Five windows and three bytes: two windows for each part, with one between them."""
    task = numbered(tmp_path, 100, 8)
    valid = task.texts[1]
    rows = [task.batch(1, Draw(run, k, stream), "cpu") for run, k in ((0, 0), (7, 1), (0, 2))]
    tokens = torch.cat([inputs for inputs, _ in rows]).flatten().numpy()
    assert np.array_equal(tokens[:16], valid[start : start + 16])
    assert np.array_equal(tokens[16:], valid[start : start + 8]), "starts again"
    targets = torch.cat([targets for _, targets in rows]).flatten().numpy()
    assert np.array_equal(targets[:16], valid[start + 1 : start + 17])


@pytest.mark.parametrize("size", [41, 42, 48, 49, 57, 999])
def test_selection_and_test_share_no_byte(tmp_path: Path, size: int) -> None:
    length = 8
    train = write(tmp_path / "train.txt")
    valid = write(tmp_path / "valid.txt", (PROSE * 9)[:size])
    task = CharLM(path=str(train), valid=str(valid), length=length)
    selection, test = task.part(SELECTION), task.part(TEST)
    text = valid.read_bytes()
    assert text.startswith(selection.tobytes())
    assert text.endswith(test.tobytes())
    # The byte after the last window of selection is a target, and belongs to the gap.
    assert size - len(selection) - len(test) == length - 1
    windows = [(len(part) - 1) // length for part in (selection, test)]
    assert min(windows) >= 2
    assert 0 <= windows[1] - windows[0] <= 1
    assert task.part(TRAINING).tobytes() == PROSE


def test_selection_begins_with_the_batches_of_the_whole_text(tmp_path: Path) -> None:
    """Decisions of earlier versions stay as they were, unless they read the second half."""
    task = CharLM(path=str(write(tmp_path / "a.txt")), split=0.5, length=8)
    valid = task.texts[1]
    tokens = torch.cat([task.batch(4, Draw(0, k, SELECTION), "cpu")[0] for k in range(9)])
    assert np.array_equal(tokens.flatten().numpy(), valid[: tokens.numel()])


# --- figures -------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [SELECTION, TEST])
def test_final_figures_are_of_every_byte_but_the_first(tmp_path: Path, stream: int) -> None:
    """A table of pairs has a loss that can be counted by hand, the last, short window too."""
    task = numbered(tmp_path, 100, 8)
    table = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    part = torch.tensor(np.array(task.part(stream))).long()
    expected = torch.nn.functional.cross_entropy(table[part[:-1]].double(), part[1:])

    def forward(tokens: Tensor) -> Tensor:
        return table[tokens]

    figures = task.final_figures(forward, 4, [Draw(0, 0, stream)], "cpu")
    assert figures == task.whole_figures(forward, 4, "cpu", stream)
    assert (figures == task.whole_figures(forward, 4, "cpu")) == (stream == TEST)
    assert figures["loss"] == pytest.approx(float(expected), rel=1e-6)
    assert figures["bits per byte"] == pytest.approx(figures["loss"] / math.log(2))
    assert figures["perplexity"] == pytest.approx(math.exp(figures["loss"]))


def test_the_metric_is_the_loss_in_bits(tmp_path: Path) -> None:
    task = numbered(tmp_path, 100, 8)
    _, targets = task.batch(3, Draw(0), "cpu")
    assert float(task.metric(torch.zeros(3, 8, 256), targets)) == pytest.approx(8)


@pytest.mark.parametrize(
    ("name", "fma"),
    [
        ("uniform", 7_602_336),
        ("main", 53_706_240),
        ("loose", 53_706_240),
        ("deep", 113_351_040),
    ],
)
def test_the_configs_have_the_paper_s_size(name: str, fma: int) -> None:
    config = load_config(CONFIGS / f"{name}.toml")
    with torch.device("meta"):
        model = Transformer(config.model.spec(config.task))
    accounting = ACCOUNTINGS[config.compress.accounting]
    assert total_fma(model.axis_table(), accounting, named_tensors(model)) == fma
    assert config.train.batch * config.train.accumulate == 96
    assert config.task.length == 512


# --- a run ---------------------------------------------------------------------------

TINY = {
    "task.length": 8, "model.width": 8, "model.layers": 1, "model.heads": 2, "model.d_k": 4,
    "model.d_v": 4, "model.d_f": 8, "target.loss": 5.0, "target.hold": "pressed",
    "compress.lr": 0.02, "compress.interval": 5,
    "compress.trust": 8.0, "train.steps": 30, "train.warmup": 4, "train.cooldown": 8,
    "train.batch": 4, "train.log_every": 5, "train.eval_every": 10, "train.eval_batches": 1,
    "train.final_batches": 2, "train.checkpoint_every": 10, "train.device": "cpu",
}  # fmt: skip


def tiny(path: Path, **changes: Any) -> Any:
    settings = TINY | {"task.path": str(path), "task.split": 0.2}
    settings |= {key.replace("__", "."): value for key, value in changes.items()}
    return load_config(
        CONFIGS / "small.toml", {key: json.dumps(value) for key, value in settings.items()}
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("charlm")
    Trainer(tiny(write(folder / "a.txt")), folder / "run").run()
    return folder / "run"


def test_the_summary_is_of_all_the_test_text(run: Path) -> None:
    summary = read(run / "summary.json")
    assert summary["fma_final"] < summary["fma_initial"]
    config = tiny(run.parent / "a.txt")
    trainer = Trainer(config, run, "resume")
    predict = predictor(trainer.model, config, "cpu")
    chosen, figures = (
        config.task.final_figures(predict, 4, [Draw(0, 0, stream)], "cpu")
        for stream in (SELECTION, TEST)
    )
    assert figures["loss"] == summary["loss"] != chosen["loss"] == summary["selection_loss"]
    assert summary["metric"] == {"name": "bits per byte", "value": figures["bits per byte"]}
    assert summary["figures"] == {"perplexity": figures["perplexity"]}
    sampled = evaluate(trainer.model, config, 2, "cpu").loss
    assert sampled != summary["loss"]


def test_the_report_shows_the_figures(run: Path) -> None:
    Trainer(tiny(run.parent / "a.txt"), run.parent / "shown").run()
    shown = run.parent / "shown"
    perplexity = read(shown / "summary.json")["figures"]["perplexity"]
    rows = {row[0]: row for row in before_after([load_run(shown)]).rows}
    assert rows["perplexity"][2] == f"{perplexity:.4g}"
    assert rows["bits per byte"][2] == f"{math.log2(perplexity):.4g}"
    assert collect_results([shown])["runs"][0]["figures"] == {"perplexity": perplexity}


def test_a_resumed_run_continues_at_its_position(tmp_path: Path) -> None:
    config = tiny(write(tmp_path / "a.txt"))
    whole = Trainer(config, tmp_path / "whole")
    keep_images(whole, 23)
    whole.run()
    Trainer(tiny(tmp_path / "a.txt"), tmp_path / "23", "resume").run()
    assert_same_run(tmp_path / "whole", tmp_path / "23")


@pytest.mark.parametrize("part", ["training", "validation"])
def test_resuming_needs_the_text_of_the_first_start(tmp_path: Path, part: str) -> None:
    path = write(tmp_path / "a.txt")
    stop_at(Trainer(tiny(path), tmp_path / "run"), 12)
    before, data = contents(tmp_path / "run"), path.read_bytes()
    at = 99 if part == "training" else len(data) - 99
    path.write_bytes(data[:at] + b"#" + data[at + 1 :])
    with pytest.raises(UserError, match=rf"^--resume: the {part} text of '.*a.txt', .* put that"):
        Trainer(tiny(path), tmp_path / "run", "resume")
    assert contents(tmp_path / "run") == before
    path.write_bytes(data)
    Trainer(tiny(path), tmp_path / "run", "resume").folder.close()


def test_a_run_without_fingerprints_can_be_resumed(tmp_path: Path) -> None:
    """Earlier versions stored none."""
    path = write(tmp_path / "a.txt")
    stop_at(Trainer(tiny(path), tmp_path / "run"), 12)
    initial = read(tmp_path / "run" / "initial.json")
    assert initial.pop("data")
    (tmp_path / "run" / "initial.json").write_text(json.dumps(initial))
    Trainer(tiny(path), tmp_path / "run", "resume").folder.close()


def test_a_missing_text_keeps_an_existing_run(tmp_path: Path) -> None:
    Trainer(tiny(write(tmp_path / "a.txt")), tmp_path / "run").run()
    before = contents(tmp_path / "run")
    with pytest.raises(UserError, match="no such file or folder"):
        Trainer(tiny(tmp_path / "gone.txt"), tmp_path / "run", "overwrite")
    assert contents(tmp_path / "run") == before


# --- the command line ----------------------------------------------------------------


def test_generate_continues_the_prompt(run: Path, gaugelasso: Command) -> None:
    options = ("--prompt", "été \x1b[1m", "--length", 60, "--device", "cpu")
    code, out, err = gaugelasso("generate", run, *options)
    assert (code, err) == (0, "")
    # Control characters and invalid UTF-8 are replaced.
    assert out.startswith("été \ufffd[1m")
    assert 10 < len(out) <= len("été \x1b[1m") + 60 + 1
    assert gaugelasso("generate", run, *options)[1] == out
    assert gaugelasso("generate", run, *options, "--seed", 1)[1] != out
    short = ("generate", run, "--length", 30)
    greedy = [gaugelasso(*short, "--temperature", 0, "--seed", s)[1] for s in (0, 1)]
    assert greedy[0] == greedy[1]
    assert greedy[0] == gaugelasso(*short, "--top-k", 1)[1]


def test_generate_writes_the_tokens_of_the_plain_decoder(run: Path, gaugelasso: Command) -> None:
    """Also past the model's length."""
    model = load_model(run).eval()
    generator = torch.Generator().manual_seed(5)
    tokens = sample(model, b"The ", temperature=0.7, top_k=9, generator=generator)
    expected = "".join(readable([*b"The ", *itertools.islice(tokens, 90)]))
    options = ("--temperature", 0.7, "--top-k", 9, "--seed", 5, "--length", 90, "--device", "cpu")
    assert model.initial_spec.length < 90
    assert gaugelasso("generate", run, "--prompt", "The ", *options)[1] == expected + "\n"
    short = ("generate", run, "--length", 30, "--device", "cpu")
    assert gaugelasso(*short, "--top-p", 1e-9)[1] == gaugelasso(*short, "--temperature", 0)[1]
    code, _, err = gaugelasso("generate", run, "--top-p", 0)
    assert (code, "top_p = 0.0: must be above 0" in err) == (2, True)


def test_generate_explains_its_errors(run: Path, tmp_path: Path, gaugelasso: Command) -> None:
    def error_of(*arguments: str | Path) -> str:
        code, _, err = gaugelasso("generate", *arguments)
        assert code == 2
        assert len(err.strip().splitlines()) == 1
        return err

    assert "the prompt is empty" in error_of(run, "--prompt", "")
    assert "no such folder" in error_of(tmp_path / "none")
    config = read(run / "config.json")
    config["task"] = {"name": "retrieval"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "is a run of the task 'retrieval'; generate needs a run of 'charlm'" in error_of(
        tmp_path
    )


def test_eval_of_another_text(run: Path, tmp_path: Path, gaugelasso: Command) -> None:
    other = write(tmp_path / "other.txt", PROSE.upper())
    options = ("--set", f"task.valid={other}", "--set", "task.split=0", "--device", "cpu")
    code, out, err = gaugelasso("eval", run, "--whole", *options)
    assert (code, err) == (0, "")
    assert out.startswith("loss ")
    assert "perplexity" in out
    assert out.endswith("(all test data)\n")
    assert gaugelasso("eval", run, "--whole", "--batches", 1, *options)[1] == out
    code, _, err = gaugelasso("eval", run, "--set", "task.length=512")
    assert code == 2
    assert "does not fit this task's length" in err


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (b"a\xc3\xa9\n\tb", "aé\n\tb"),
        (b"a\xc3b\xff\xf0\x9f", "a\ufffdb\ufffd\ufffd"),
        (b"\x1b[2J\x00\x7f\r", "\ufffd[2J\ufffd\ufffd\ufffd"),
        (b"", ""),
    ],
)
def test_any_bytes_can_be_printed(tokens: bytes, expected: str) -> None:
    assert "".join(readable(tokens)) == expected


def test_the_defaults_are_the_paper_s() -> None:
    assert TASKS["charlm"]() == CharLM(length=512)
