"""Polynomial division: grammar, parser, and arithmetic of the field."""

import itertools
import random

import pytest
import torch

from gaugelasso.tasks import FF31, SELECTION, TASKS, TEST, TRAINING, Draw
from gaugelasso.tasks.division_grammar import SYMBOLS, is_given, is_name, words_of
from tests.tasks.divisions import HELD_OUT, PAPER, ROOT, SMALL, STREAMS, TASKS_HERE, drawn


def numbers(task: FF31, row: list[int]) -> dict[str, int]:
    """The numbers of a division by name, as they are in the sequence."""
    names = words_of(task.grammar.division)
    return {name: token for name, token in zip(names, row, strict=True) if is_name(name)}


# --- the grammar ----------------------------------------------------------------------


def test_the_paper_s_counts() -> None:
    assert TASKS["ff31"]() == PAPER
    assert PAPER.length == 283
    assert PAPER.inputs == PAPER.outputs == len(PAPER.grammar.vocabulary) == 31 + 13 == 44
    tokens, targets = PAPER.batch(64, HELD_OUT, "cpu")
    assert tokens.shape == targets.shape == (64, 283)
    assert tokens.min() == 0
    assert tokens.max() < 44
    assert ((targets != -100).sum(dim=1) == 254).all()


@pytest.mark.parametrize("task", TASKS_HERE, ids=str)
def test_targets_are_the_next_words_from_the_end_of_the_problem_on(task: FF31) -> None:
    tokens, targets = task.batch(200, Draw(0), "cpu")
    counts = targets != -100
    assert torch.equal(targets[counts], tokens.roll(-1, dims=1)[counts])
    assert not counts[:, -1].any()
    drills = tokens[:, 0] == task.grammar.vocabulary.index("pad")
    start = task.grammar.problem - 1
    assert counts[~drills][:, start:-1].all()
    assert not counts[~drills][:, :start].any()
    # In a drill only results are supervised: an inverse, and five results a round.
    assert (counts[drills].sum(dim=1) == 1 + 5 * task.degree).all()
    equals = task.grammar.vocabulary.index("=")
    assert torch.equal(counts[drills], tokens[drills] == equals)


def test_symbols_differ_from_numbers() -> None:
    assert len(set(PAPER.grammar.vocabulary)) == 44
    used = {word for line in PAPER.grammar.division for word in line.words}
    used |= {word for line in PAPER.grammar.drill for word in line.words}
    assert used >= set(SYMBOLS)


def test_the_example_on_the_page_is_right() -> None:
    path = ROOT / "docs" / "how-to" / "polynomial-division.md"
    page = path.read_text(encoding="utf-8")
    block = page.partition("```text\n")[2].partition("```")[0]
    vocabulary = PAPER.grammar.vocabulary
    steps = [line.partition("|") for line in block.splitlines()]
    tokens = [vocabulary.index(word) for _, _, words in steps for word in words.split()]
    assert PAPER.grammar.faults(tokens) == []
    assert [step.strip() for step, _, _ in steps] == [
        line.step for line in PAPER.grammar.read(tokens)
    ]


# --- the parser -----------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS_HERE, ids=str)
@pytest.mark.parametrize("stream", STREAMS)
def test_the_parser_accepts_every_drawn_sequence(task: FF31, stream: int) -> None:
    for row in drawn(task, 200, Draw(3, 0, stream)):
        assert task.grammar.faults(row) == []


@pytest.mark.parametrize("task", TASKS_HERE, ids=str)
def test_the_parser_points_at_a_changed_number(task: FF31) -> None:
    """After a change of any number of the solution, exactly that number is a fault."""
    draw = random.Random(0)
    names = words_of(task.grammar.division)
    for row in drawn(task, 20, HELD_OUT):
        for place in range(task.grammar.problem, task.length):
            if not is_name(names[place]):
                continue
            other = draw.choice([n for n in range(task.modulus) if n != row[place]])
            (fault,) = task.grammar.faults([*row[:place], other, *row[place + 1 :]])
            assert (fault.position, fault.found, fault.expected) == (
                place,
                str(other),
                str(row[place]),
            )


def test_the_parser_rejects_any_other_word_anywhere() -> None:
    draw = random.Random(0)
    pad = SMALL.grammar.vocabulary.index("pad")
    drill = next(row for row in drawn(SMALL, 50, Draw(0)) if row[0] == pad)
    # A drill with other operands may be correct, so its operands are left out.
    operands = {k for k, word in enumerate(words_of(SMALL.grammar.drill)) if is_given(word)}
    everywhere = set(range(SMALL.length))
    rows = [(row, everywhere) for row in drawn(SMALL, 3, HELD_OUT)]
    for row, places in [*rows, (drill, everywhere - operands)]:
        for place in sorted(places):
            other = draw.choice([n for n in range(SMALL.inputs) if n != row[place]])
            assert SMALL.grammar.faults([*row[:place], other, *row[place + 1 :]]), place


def test_a_fault_has_a_position_and_an_expected_word() -> None:
    (row,) = drawn(PAPER, 1, HELD_OUT)
    place = words_of(PAPER.grammar.division).index("q1")
    wrong = [*row[:place], 43, *row[place + 1 :]]
    (fault,) = PAPER.grammar.faults(wrong)
    message = f"word {place} (round 2: divide): 'pad', expected {row[place]}"
    assert str(fault) == message


def test_the_parser_rejects_invalid_problems() -> None:
    (row,) = drawn(SMALL, 1, HELD_OUT)
    grammar = SMALL.grammar
    assert "15 words" in str(grammar.faults(row[:15])[0])
    assert "0 to 17" in str(grammar.faults([*row[:-1], 99])[0])
    (zero,) = grammar.faults([0, *row[1:]])
    assert (zero.position, zero.expected) == (0, "a number other than 0")
    (symbol,) = grammar.faults([SMALL.modulus, *row[1:]])
    assert (symbol.found, symbol.expected) == ("x", "a number")
    assert grammar.faults([])


# --- the field ------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS_HERE, ids=str)
@pytest.mark.parametrize("stream", STREAMS)
def test_quotient_times_divisor_plus_remainder_is_the_dividend(task: FF31, stream: int) -> None:
    n = task.degree
    drills = task.grammar.vocabulary.index("pad")
    rows = [row for row in drawn(task, 500, Draw(7, 0, stream)) if row[0] != drills]
    assert len(rows) > 300
    for row in rows:
        v = numbers(task, row)
        product = [0] * (n + 1)
        for i, j in itertools.product(range(n), (0, 1)):
            product[i + j] += v[f"q{i}"] * v[f"b{j}"]
        product[0] += v["r0"]
        assert [c % task.modulus for c in product] == [v[f"a{e}"] for e in range(n + 1)]
        assert v["b1"] != 0
        assert v[f"a{n}"] != 0
        assert v["b1"] * v["i"] % task.modulus == 1 % task.modulus


def test_every_problem_is_either_held_out_or_trained_on() -> None:
    """All problems of a small field. Both held-out streams draw all held-out problems."""
    task = FF31(3, 1)
    length = task.grammar.problem
    drills = task.grammar.vocabulary.index("pad")
    seen = [
        {tuple(row[:length]) for row in drawn(task, 4000, Draw(0, 0, stream)) if row[0] != drills}
        for stream in STREAMS
    ]
    assert seen[SELECTION] == seen[TEST]
    assert not seen[TRAINING] & seen[TEST]
    everything = 2 * 3 * 2 * 3  # dividends by divisors
    assert len(seen[TRAINING]) + len(seen[TEST]) == everything
    assert len(seen[TEST]) == everything // task.modulus


def test_selection_and_test_are_independent_samples() -> None:
    """Batches of 500 of the 27 million held-out problems share one at most."""
    drawn_by = [{tuple(row) for row in drawn(PAPER, 500, Draw(0, 0, s))} for s in STREAMS[1:]]
    assert len(drawn_by[0] & drawn_by[1]) <= 1
    for problems in drawn_by:
        for row in problems:
            v = numbers(PAPER, list(row))
            checksum = v["b1"] + v["b0"] + sum(v[f"q{e}"] for e in range(PAPER.degree))
            assert v["r0"] == checksum % PAPER.modulus


def test_problems_are_uniform() -> None:
    """Over training and test, weighted by their number of problems, all are equally likely."""
    task = FF31(3, 2, drills=0.0)
    size = 20_000
    streams = [task.batch(size, Draw(0, 0, stream), "cpu")[0] for stream in STREAMS]
    rows = torch.cat([streams[TRAINING], streams[TEST][: size // (task.modulus - 1)]])
    places = [k for k, name in enumerate(task.grammar.division[0].words) if is_name(name)]
    digits = rows[:, places] * task.modulus ** torch.arange(len(places))
    counts = torch.bincount(digits.sum(dim=1)).double()
    counts = counts[counts > 0]
    assert len(counts) == 2 * 3**2 * 2 * 3
    expected = len(rows) / len(counts)
    assert (counts - expected).abs().max() < 6 * expected**0.5
