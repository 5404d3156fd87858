"""The retrieval task: labels, streams, loss and metric."""

import math

import pytest
import torch
from torch import Tensor

from gaugelasso.errors import UserError
from gaugelasso.tasks import EVALUATION, SELECTION, TASKS, TEST, TRAINING, Draw, Noise, Retrieval

TASK = Retrieval(vocabulary=20, modulus=7, length=15)
STREAMS = (TRAINING, SELECTION, TEST)


def slow_labels(task: Retrieval, tokens: Tensor) -> Tensor:
    """Position by position, as in the definition of the task."""
    labels = []
    for row in tokens.tolist():
        labels.append([])
        for position, token in enumerate(row):
            source = position - token % task.modulus
            labels[-1].append(row[source] if source >= 0 else task.vocabulary)
    return torch.tensor(labels)


@pytest.mark.parametrize(
    "task",
    [TASK, Retrieval(vocabulary=5, modulus=5, length=9), Retrieval(64, 7, 32), Retrieval(9, 1, 4)],
    ids=str,
)
def test_labels_are_those_of_a_slow_loop(task: Retrieval) -> None:
    tokens, labels = task.batch(12, Draw(3), "cpu")
    assert torch.equal(labels, slow_labels(task, tokens))


def test_labels_by_hand() -> None:
    task = Retrieval(vocabulary=6, modulus=3, length=5)
    tokens = torch.tensor([[1, 3, 2, 4, 5]])  # offsets 1 0 2 1 2
    assert task.labels(tokens).tolist() == [[6, 3, 1, 2, 2]]


def test_offsets_before_the_start_are_a_separate_class() -> None:
    _, labels = TASK.batch(200, Draw(0), "cpu")
    assert TASK.outputs == TASK.vocabulary + 1
    assert int(labels.max()) == TASK.vocabulary
    # Every offset fits from position modulus - 1 on; at the first only offset 0 does.
    assert not (labels[:, TASK.modulus - 1 :] == TASK.vocabulary).any()
    share = (labels[:, 0] == TASK.vocabulary).double().mean()
    offset_zero = len(range(0, TASK.vocabulary, TASK.modulus)) / TASK.vocabulary
    assert share == pytest.approx(1 - offset_zero, abs=0.1)


def test_tokens_are_uniform_over_the_vocabulary() -> None:
    tokens, _ = TASK.batch(1000, Draw(0), "cpu")
    assert tokens.shape == (1000, TASK.length)
    counts = torch.bincount(tokens.flatten(), minlength=TASK.vocabulary)
    assert len(counts) == TASK.vocabulary
    expected = tokens.numel() / TASK.vocabulary
    assert (counts - expected).abs().max() < 6 * math.sqrt(expected)


def test_a_batch_depends_on_its_draw_alone() -> None:
    first = TASK.batch(8, Draw(5), "cpu")
    torch.manual_seed(99)
    torch.rand(3)
    TASK.batch(8, Draw(6), "cpu")
    again = TASK.batch(8, Draw(5), "cpu")
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    state = torch.random.get_rng_state()
    TASK.batch(8, Draw(5), "cpu")
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not torch.equal(first[0], TASK.batch(8, Draw(6), "cpu")[0])


@pytest.mark.parametrize("task", [TASK, Noise(vocabulary=20, length=15)], ids=str)
def test_the_streams_of_a_sampled_task_share_no_sequence(task: Retrieval | Noise) -> None:
    batches = [task.batch(64, Draw(42, 0, stream), "cpu")[0] for stream in STREAMS]
    assert len({tuple(row) for row in torch.cat(batches).tolist()}) == 3 * 64


def test_every_draw_has_its_own_seed() -> None:
    """No seed of one stream is a seed of another stream or run."""
    runs, length = (0, 1, 42, 2**62), 500
    seeds = [
        Draw(run, index, stream).seed
        for run in runs
        for stream in STREAMS
        for index in range(length)
    ]
    assert len(set(seeds)) == len(runs) * len(STREAMS) * length
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_selection_and_test_are_held_out() -> None:
    assert [Draw(0, stream=stream).held_out for stream in STREAMS] == [False, True, True]
    assert EVALUATION == SELECTION


def test_streams_are_the_same_everywhere() -> None:
    """The seeds of past results: changing them changes every figure."""
    assert Draw(42).seed == 5732826375231505755
    assert Draw(42, stream=SELECTION).seed == 7829184764001561178
    assert Draw(42, stream=TEST).seed == 5910823727984653262


def test_loss_and_metric_of_an_oracle_and_of_a_guess() -> None:
    _, labels = TASK.batch(16, Draw(0), "cpu")
    oracle = 50.0 * torch.nn.functional.one_hot(labels, TASK.outputs).float()
    assert float(TASK.loss(oracle, labels)) == pytest.approx(0, abs=1e-6)
    assert float(TASK.metric(oracle, labels)) == 1.0
    guess = torch.zeros(*labels.shape, TASK.outputs)
    assert float(TASK.loss(guess, labels)) == pytest.approx(math.log(TASK.outputs), rel=1e-5)
    half = oracle.clone()
    half[:8] = -half[:8]
    assert float(TASK.metric(half, labels)) == pytest.approx(0.5)


def test_the_loss_is_float32() -> None:
    _, labels = TASK.batch(16, Draw(0), "cpu")
    outputs = torch.randn(*labels.shape, TASK.outputs, dtype=torch.bfloat16)
    assert TASK.loss(outputs, labels).dtype == torch.float32
    assert TASK.loss(outputs, labels).shape == TASK.metric(outputs, labels).shape == ()


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ({"vocabulary": 0}, r"task\.vocabulary = 0"),
        ({"modulus": -1}, r"task\.modulus = -1"),
        ({"length": 0}, r"task\.length = 0"),
        ({"vocabulary": 4, "modulus": 5}, r"modulus = 5 is larger than task\.vocabulary = 4"),
    ],
)
def test_invalid_settings_are_rejected(numbers: dict[str, int], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        Retrieval(**numbers)


def test_the_paper_s_task_is_the_default() -> None:
    assert TASKS["retrieval"]() == Retrieval(vocabulary=4096, modulus=61, length=192)
