"""The callback for the Trainer of transformers: refuses, logs, ends and finishes.

optimizer = CompressorOptimizer(compressor, model)
callback = CompressorCallback(optimizer)
Trainer(
    model,
    args,
    train_dataset=data,
    optimizers=(optimizer, CompressorSchedule(optimizer)),
    callbacks=[callback],
).train()
callback.result
"""

from collections.abc import Callable
from enum import Enum
from typing import Any

from gaugelasso.compress.result import Result
from gaugelasso.errors import UserError, first_line
from gaugelasso.integrations.optimizer import CompressorOptimizer, CompressorSchedule

try:
    from accelerate.optimizer import AcceleratedOptimizer
    from transformers import TrainerCallback
except ImportError as error:
    raise UserError(
        f"the Trainer needs transformers and accelerate ({first_line(error)}): "
        "pip install 'gaugelasso[trainer]'"
    ) from None

# Arguments of the Trainer: whether a value is refused, and what would be right.
_REFUSED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "fp16": (bool, "a GradScaler skips steps that the compressor counts; use bf16=True"),
    "label_smoothing_factor": (
        bool,
        "the Trainer would compute a loss that the compressor does not see; smooth in the loss "
        "that the model returns",
    ),
    "torch_compile": (bool, "a cut replaces the parameters of the compiled model"),
    "auto_find_batch_size": (bool, "training would begin again with the steps that are left"),
    "deepspeed": (bool, "it keeps parameters of its own; train in one process without it"),
    "fsdp": (bool, "it keeps parameters of its own; train in one process without it"),
    "fp16_full_eval": (bool, "it converts the weights; use bf16=True, which does not"),
    "bf16_full_eval": (bool, "it converts the weights; use bf16=True, which does not"),
    "world_size": (lambda value: value > 1, "the model must be in one process"),
    "n_gpu": (lambda value: value > 1, "the model must be on one device; hide the others"),
    "save_strategy": (
        lambda value: value != "no",
        "its checkpoints lack the structure of the model; use save_strategy='no' and "
        "Compressor(..., record=FOLDER)",
    ),
}
# Its name in the state of the Trainer, which lists the callbacks that have a state.
_EARLY = "EarlyStoppingCallback"


class CompressorCallback(TrainerCallback):
    """Ends training when the compressor is done, and has its `result` afterwards.

    Adds `fma`, `parameters`, `rho` and, under pressure, `pressed_loss` to the rows of the
    Trainer's log. At the begin of training it refuses arguments that do not work, by UserError.
    """

    def __init__(self, optimizer: CompressorOptimizer):
        if optimizer.compressor.pilot is None:
            raise UserError(
                "the Trainer needs a compressor with a course: give Compressor steps=... or "
                "seconds=..."
            )
        self.optimizer = optimizer
        self.result: Result | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for name, (refused, reason) in _REFUSED.items():
            if refused(value := getattr(args, name)):
                plain = value.value if isinstance(value, Enum) else value
                raise UserError(f"{name} = {plain!r}: {reason}")
        if _EARLY in (state.stateful_callbacks or {}):
            raise UserError(
                f"{_EARLY}: the loss rises under pressure, so that training would end before its "
                "last anneal; remove it: the compressor ends training"
            )
        self._check_given(kwargs["optimizer"], kwargs["lr_scheduler"], kwargs["model"])
        self._check_length(state)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.optimizer.compressor.done:
            control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: dict, **kwargs: Any) -> None:
        # The history has a copy of the row already.
        for row in (logs, state.log_history[-1]):
            row.update(self._figures())

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.result = self.optimizer.compressor.finish()
        self.optimizer.refresh_()

    def _figures(self) -> dict[str, float]:
        compressor = self.optimizer.compressor
        figures = {
            "fma": compressor.fma,
            "parameters": compressor.parameters,
            "rho": float(compressor.rho),
        }
        pilot = compressor.pilot
        pressed = None if pilot is None else pilot.pressed_loss(pilot.now)
        return figures if pressed is None else figures | {"pressed_loss": pressed}

    def _check_given(self, optimizer: Any, schedule: Any, model: Any) -> None:
        if isinstance(optimizer, AcceleratedOptimizer):
            optimizer = optimizer.optimizer
        if optimizer is not self.optimizer or not isinstance(schedule, CompressorSchedule):
            raise UserError(
                f"optimizers = ({type(optimizer).__name__}, {type(schedule).__name__}): the "
                "compressor takes the steps and sets the learning rate; give the Trainer "
                "optimizers=(optimizer, CompressorSchedule(optimizer)) with the optimizer of the "
                "callback"
            )
        if model is not self.optimizer.model:
            raise UserError(
                f"the Trainer has another {type(model).__name__} than the optimizer; give both "
                "the same model"
            )

    def _check_length(self, state: Any) -> None:
        compressor = self.optimizer.compressor
        pilot = compressor.pilot
        assert pilot is not None
        if state.global_step:
            raise UserError(
                f"resume_from_checkpoint: step {state.global_step} of a checkpoint of the "
                "Trainer; a compressor resumes by Compressor(..., record=FOLDER, resume=True)"
            )
        left = 0 if pilot.timed else pilot.end - compressor.steps
        if state.max_steps < left:
            raise UserError(
                f"max_steps = {state.max_steps}: the compressor has {left} steps to take; give "
                f"max_steps={left}, or more epochs"
            )
