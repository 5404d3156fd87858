"""What the command `compress` decides by itself."""

from pathlib import Path

import numpy as np
import pytest

from gaugelasso.cli.compression_options import Share, Wanted, parse_share
from gaugelasso.cli.compression_plan import plan
from gaugelasso.config import Config
from gaugelasso.errors import UserError
from gaugelasso.tasks import SELECTION
from tests.cli.compress.commands import VOCABULARY


def test_shares() -> None:
    assert [parse_share(text).value for text in ("3%", "0.03", " .5 % ", "0", "1e-2", "300%")] == [
        0.03, 0.03, 0.005, 0.0, 0.01, 3.0,
    ]  # fmt: skip
    assert parse_share(" 5%").text == "5%"
    for text in ("1", "3", "1e2"):
        with pytest.raises(UserError, match=f"'{text}' would be .*00%; write {text}% or .*00%"):
            parse_share(text)
    for text in ("", "%", "3 percent", "-1", "nan", "inf", "1e999"):
        with pytest.raises(UserError, match="--above-original"):
            parse_share(text)


@pytest.mark.parametrize(("tokens", "steps"), [(9_000, 1000), (300_000, 2226), (10**6, 4000)])
def test_steps_follow_from_the_text(tokens: int, steps: int, out: Path) -> None:
    np.save("text.npy", np.arange(tokens) % VOCABULARY)
    share = Share(0.03, "3%")
    found = plan(out / "base", Wanted("text.npy", None, share, None, None, 8, {}))
    train, task = found.config.train, found.task
    assert train.steps == steps
    assert (train.batch, task.split, task.length) == (16, 0.05, 8)
    # All selection data once.
    windows = (len(task.part(SELECTION)) - 1) // 8
    assert (train.final_batches - 1) * 16 < min(windows, 64 * 16) <= train.final_batches * 16
    assert train.eval_batches == min(train.final_batches, 8)
    wanted = Wanted("text.txt", None, share, 50, 2, None, {"task.valid": "valid.txt"})
    given = plan(out / "base", wanted)
    assert (given.config.train.steps, given.task.length, given.task.split) == (50, 40, 0.0)
    assert "50 steps of 80 tokens in windows of 40" in given.describe()
    named = given.with_target(3.5)
    assert Config.from_dict(named.sections) == named.config
