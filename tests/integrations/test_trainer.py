"""The Trainer of transformers and the loop with accelerate: examples, logs and refusals."""

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gaugelasso import Compressor, CompressorOptions, UserError
from gaugelasso.integrations import CompressorOptimizer, CompressorSchedule, LossModel
from tests.compress.own_loops import Perceptron
from tests.docs.pages import DOCS, ROOT, blocks
from tests.examples import example

# Not imported here: it would cost every worker two seconds.
if not all(map(importlib.util.find_spec, ("accelerate", "transformers"))):
    pytest.skip("needs accelerate and transformers", allow_module_level=True)

STEPS = 20
# Of a CPU without instructions for bfloat16, which computes it in another way.
SLOW_BF16 = "ignore:mkldnn_matmul failed"


@pytest.fixture(autouse=True)
def _own_accelerator() -> Iterator[None]:
    """Accelerate keeps the settings of the first Accelerator of a process."""
    from accelerate.state import AcceleratorState, GradientState

    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class Setting:
    """A Trainer of the example's perceptron; what is left of the model is in `callback.result`."""

    def __init__(
        self,
        folder: Path,
        *,
        schedule: bool = True,
        seconds: float | None = None,
        **arguments: Any,
    ):
        import transformers

        from gaugelasso.integrations import CompressorCallback

        torch.manual_seed(0)
        self.network = Perceptron(8, 16, 3)
        self.model = LossModel(self.network, F.mse_loss)
        x, noise = torch.randn(64, 8), torch.randn(64, 3)
        data = [{"inputs": a, "labels": b} for a, b in zip(x, 0.1 * noise, strict=True)]
        options = CompressorOptions(lr=0.02, interval=5)
        steps = STEPS if seconds is None else None
        self.compressor = Compressor(self.network, 5.0, options, steps=steps, seconds=seconds)
        self.optimizer = CompressorOptimizer(self.compressor, self.model)
        self.callback = CompressorCallback(self.optimizer)
        given: dict[str, Any] = {
            "max_steps": STEPS,
            "per_device_train_batch_size": 16,
            "logging_steps": 5,
            "save_strategy": "no",
            "report_to": "none",
            "use_cpu": True,
            "dataloader_pin_memory": False,
            "disable_tqdm": True,
        }
        self.trainer = transformers.Trainer(
            self.model,
            transformers.TrainingArguments(str(folder), **given | arguments),
            train_dataset=data,
            eval_dataset=data[:16],
            optimizers=(self.optimizer, CompressorSchedule(self.optimizer) if schedule else None),
            callbacks=[self.callback],
        )

    def begin(self, **changed: Any) -> None:
        """What the callback says to the Trainer's arguments, with some of them changed."""
        trainer, args = self.trainer, self.trainer.args
        names = [*args.to_dict(), "world_size", "n_gpu"]
        given = SimpleNamespace(**{name: getattr(args, name) for name in names} | changed)
        state = SimpleNamespace(global_step=0, max_steps=STEPS, stateful_callbacks={})
        self.callback.on_train_begin(
            given,
            state,
            trainer.control,
            optimizer=self.optimizer,
            lr_scheduler=trainer.lr_scheduler,
            model=self.model,
        )


@pytest.mark.parametrize("name", ["hf_trainer", "accelerate_loop"])
def test_the_example_holds_its_loss_with_less_work(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    result = example(name).main(steps=160, loss_target=1.8)
    assert result.held
    assert result.fma < result.fma_initial
    assert f"held: True; FMA {result.fma_initial:,.0f} -> {result.fma:,.0f}" in (
        capsys.readouterr().out
    )


def test_the_log_has_work_and_rate(tmp_path: Path) -> None:
    setting = Setting(tmp_path)
    rates = []
    step = setting.compressor.step

    def watched(loss: Any) -> Any:
        event = step(loss)
        rates.append(float(setting.compressor.scalars.lr))
        return event

    setting.compressor.step = watched  # type: ignore[method-assign]
    setting.trainer.train()
    result = setting.callback.result
    assert result is not None
    assert result.held
    rows = [row for row in setting.trainer.state.log_history if "loss" in row]
    assert [row["step"] for row in rows] == [5, 10, 15, 20]
    assert [row["learning_rate"] for row in rows] == rates[4::5]
    assert rows[-1]["fma"] == result.fma
    assert rows[-1]["parameters"] == sum(p.numel() for p in setting.network.parameters())
    assert any("pressed_loss" in row for row in rows)
    (group,) = setting.optimizer.param_groups
    assert [id(p) for p in group["params"]] == [id(p) for p in setting.network.parameters()]


@pytest.mark.filterwarnings(SLOW_BF16)
def test_the_trainer_clips_accumulates_casts_and_evaluates(tmp_path: Path) -> None:
    setting = Setting(
        tmp_path,
        max_steps=10 * STEPS,  # the callback ends it
        max_grad_norm=0.1,
        gradient_accumulation_steps=2,
        bf16=True,
        eval_strategy="steps",
        eval_steps=10,
    )
    setting.trainer.train()
    assert setting.trainer.state.global_step == setting.compressor.steps == STEPS
    evaluated = [row for row in setting.trainer.state.log_history if "eval_loss" in row]
    assert [row["step"] for row in evaluated] == [10, 20]
    assert all(each.dtype is torch.float32 for each in setting.network.parameters())


@pytest.mark.parametrize(
    ("name", "value", "advice"),
    [
        ("fp16", True, "bf16=True"),
        ("label_smoothing_factor", 0.1, "smooth in the loss"),
        ("torch_compile", True, "compiled"),
        ("auto_find_batch_size", True, "begin again"),
        ("deepspeed", "ds.json", "one process"),
        ("fsdp", "full_shard", "one process"),
        ("fp16_full_eval", True, "converts"),
        ("bf16_full_eval", True, "converts"),
        ("world_size", 2, "one process"),
        ("n_gpu", 2, "one device"),
        ("save_strategy", "steps", r"record=FOLDER"),
    ],
)
def test_an_argument_that_does_not_work_is_named(
    tmp_path: Path, name: str, value: Any, advice: str
) -> None:
    setting = Setting(tmp_path)
    setting.begin()
    with pytest.raises(UserError, match=rf"^{name} = {value!r}: .*{advice}"):
        setting.begin(**{name: value})


def test_training_is_refused_before_its_first_step(tmp_path: Path) -> None:
    for arguments, message in [
        ({"schedule": False}, r"optimizers = \(CompressorOptimizer, LambdaLR\)"),
        ({"max_steps": 10}, "max_steps = 10: the compressor has 20 steps"),
        ({"save_strategy": "steps"}, "^save_strategy = 'steps': "),
    ]:
        setting = Setting(tmp_path, **arguments)
        with pytest.raises(UserError, match=message):
            setting.trainer.train()
        assert setting.compressor.steps == 0


def test_another_optimizer_or_model_is_refused(tmp_path: Path) -> None:
    setting = Setting(tmp_path)
    setting.optimizer.model = LossModel(setting.network, F.mse_loss)
    with pytest.raises(UserError, match="another LossModel than the optimizer"):
        setting.trainer.train()
    setting = Setting(tmp_path)
    setting.trainer.optimizer = torch.optim.SGD(setting.model.parameters())
    with pytest.raises(UserError, match=r"optimizers = \(SGD, CompressorSchedule\)"):
        setting.trainer.train()


def test_a_checkpoint_of_the_trainer_is_refused(tmp_path: Path) -> None:
    setting = Setting(tmp_path)
    state = SimpleNamespace(global_step=7, max_steps=STEPS)
    with pytest.raises(UserError, match=r"resume_from_checkpoint: step 7 .* resume=True"):
        setting.callback._check_length(state)


@pytest.mark.parametrize("groups", [1, 2])
def test_the_state_of_another_optimizer_is_refused(tmp_path: Path, groups: int) -> None:
    """The Trainer loads that of its checkpoint before it calls any callback."""
    setting = Setting(tmp_path)
    parameters = [*Perceptron(8, 16, 3).parameters()]
    chunks = [parameters] if groups == 1 else [parameters[:1], parameters[1:]]
    other = torch.optim.AdamW([{"params": chunk} for chunk in chunks])
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    other.step()
    with pytest.raises(UserError, match=r"resume_from_checkpoint: .* resume=True"):
        setting.optimizer.load_state_dict(other.state_dict())
    setting.optimizer.load_state_dict(setting.optimizer.state_dict())


def test_early_stopping_is_refused(tmp_path: Path) -> None:
    from transformers import EarlyStoppingCallback

    setting = Setting(
        tmp_path, eval_strategy="steps", eval_steps=5, metric_for_best_model="eval_loss"
    )
    setting.trainer.add_callback(EarlyStoppingCallback())
    with pytest.raises(UserError, match="EarlyStoppingCallback: the loss rises under pressure"):
        setting.trainer.train()
    assert setting.compressor.steps == 0


def test_a_compressor_without_a_course_is_refused() -> None:
    from gaugelasso.integrations import CompressorCallback

    network = Perceptron(8, 16, 3)
    optimizer = CompressorOptimizer(Compressor(network, 1.0), LossModel(network, F.mse_loss))
    with pytest.raises(UserError, match="give Compressor steps="):
        CompressorCallback(optimizer)


def test_a_time_budget_ends_training(tmp_path: Path) -> None:
    setting = Setting(tmp_path, seconds=0.2, max_steps=100_000)
    setting.trainer.train()
    assert setting.compressor.done
    assert 0 < setting.trainer.state.global_step < 100_000
    assert setting.callback.result is not None


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "gaugelasso.integrations.trainer", raising=False)
    monkeypatch.setitem(sys.modules, "accelerate.optimizer", None)
    with pytest.raises(UserError, match=r"pip install 'gaugelasso\[trainer\]'"):
        importlib.import_module("gaugelasso.integrations.trainer")
    with pytest.raises(UserError, match=r"pip install 'gaugelasso\[trainer\]'"):
        from gaugelasso.integrations import CompressorCallback  # noqa: F401


def test_the_callback_is_imported_on_use_alone() -> None:
    program = (
        "import sys, gaugelasso.integrations as place\n"
        "from gaugelasso.integrations import *\n"
        "assert 'transformers' not in sys.modules\n"
        "assert not hasattr(place, 'CompressorCalback')\n"
        "from gaugelasso.integrations import CompressorCallback\n"
        "assert CompressorCallback is sys.modules[place.__name__ + '.trainer'].CompressorCallback\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["hf_trainer", "accelerate_loop"])
def test_the_page_has_the_complete_programs(name: str) -> None:
    page = blocks(DOCS / "how-to" / "hugging-face-trainer.md")
    [shown] = (block.text for block in page if block.mark == f"from examples/{name}.py")
    source = (ROOT / "examples" / f"{name}.py").read_text()
    # All but the docstring, which the page has in its own words.
    assert source.split('"""\n\n', 1)[1] == shown


def test_a_loss_of_the_trainers_own_is_refused(tmp_path: Path) -> None:
    setting = Setting(tmp_path)
    setting.trainer.compute_loss_func = lambda outputs, labels, **_: F.l1_loss(
        outputs["logits"], labels
    )
    with pytest.raises(UserError, match="a loss that is computed outside of it is not seen"):
        setting.trainer.train()
    assert setting.compressor.steps == 0
