"""Parsing of --seeds and --arm."""

from pathlib import Path

import pytest

from gaugelasso.errors import UserError
from gaugelasso.sweeps.arms import parse_arms, parse_seeds


@pytest.mark.parametrize(
    ("text", "seeds"),
    [
        ("7", [7]),
        ("42-46", [42, 43, 44, 45, 46]),
        ("1,5,9", [1, 5, 9]),
        ("1-3, 9", [1, 2, 3, 9]),
        ("3,1-4", [3, 1, 2, 4]),
        ("5-5", [5]),
    ],
)
def test_seeds_are_read(text: str, seeds: list[int]) -> None:
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize(
    "text", ["x", "", "1,,2", "1-", "-1", "1-2-3", "1.5", "5-3", "1-99999999999"]
)
def test_what_are_no_seeds_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=f"--seeds {text!r}"):
        parse_seeds(text)


def test_arms_are_read() -> None:
    none, wide, odd = parse_arms(
        ["  base  line :", "k = 4: compress.trust=4  train.steps=9", "Über_x: task.length=5"],
        Path("out"),
    )
    assert (none.name, none.changes, none.folder) == ("base line", (), Path("out/base-line"))
    assert wide.changes == ("compress.trust=4", "train.steps=9")
    assert wide.run_folder(7) == Path("out/k-4/seed7")
    assert odd.folder == Path("out/über_x")


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["compress.trust=4"], "write it as 'NAME: KEY=VALUE ...'"),
        ([": compress.trust=4"], "give it a name of letters or digits"),
        (["../..:"], "give it a name of letters or digits"),
        (["a" * 61 + ":"], "at most 60 characters, not 61"),
        (["a: compress.trust = 4"], "write 'compress.trust' as key=value"),
        (["a: train.seed=3"], "leave out train.seed=3; seeds are given by --seeds"),
        (["a:", "a: compress.trust=4"], "the folder 'a' is taken by the arm 'a'"),
        (["k = 4:", "K 4: compress.trust=4"], "the folder 'k-4' is taken by the arm 'k = 4'"),
    ],
)
def test_what_are_no_arms_is_refused(texts: list[str], message: str) -> None:
    with pytest.raises(UserError) as error:
        parse_arms(texts, Path("out"))
    assert message in str(error.value)
    assert f"--arm {texts[-1]!r}: " in str(error.value)
