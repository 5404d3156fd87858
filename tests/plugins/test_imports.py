"""What is imported for its classes does not train."""

import re
import runpy
from pathlib import Path

import pytest

from gaugelasso import Compressor, UserError, load_model
from tests.command import Command, assert_user_error
from tests.plugins.own_code import MODEL
from tests.tiny_runs import contents, read

LOOP = """

from gaugelasso import Compressor


def train():
    torch.manual_seed(0)
    model = Perceptron(4, 24, 2)
    compressor = Compressor(model, loss_target=9.0, steps=20, record=RUN, resume=RESUME)
    for step in range(compressor.steps, 20):
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
        compressor.step(lambda: F.mse_loss(model(x), x[:, :2].relu()))
    compressor.finish()


"""


@pytest.mark.parametrize("resume", [False, True])
def test_a_loop_beside_its_model_does_not_train_when_its_run_is_loaded(
    own: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gaugelasso: Command,
    resume: bool,
) -> None:
    monkeypatch.syspath_prepend(str(own.parent))
    script, run = own.parent / "script.py", tmp_path / "run"
    text = MODEL + LOOP.replace("RUN", repr(str(run))).replace("RESUME", str(resume))
    script.write_text(text + "train()\n")
    runpy.run_path(str(script), run_name="__main__")
    before = contents(run)
    refused = r"script\.py' is imported for what it defines, and would train: put what trains"
    with pytest.raises(UserError, match=refused):
        load_model(run)
    for words in (("eval", run, "--set", f"task.module={script}:Task"), ("check", f"{script}:f")):
        assert_user_error(answer := gaugelasso(*words), str(script))
        assert re.search(refused, answer[2])
    script.write_text(text + 'if __name__ == "__main__":\n    train()\n')
    assert load_model(run).structure()["hidden"] == read(run / "summary.json")["widths"]["hidden"]
    assert contents(run) == before
    # Afterwards a loop may begin.
    Compressor(load_model(run), loss_target=0.5)
