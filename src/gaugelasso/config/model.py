"""The [model] section for the built-in transformer, and the limits on its size."""

import math
from dataclasses import dataclass, replace
from typing import Literal

from gaugelasso.config.activations import check_activations
from gaugelasso.errors import UserError
from gaugelasso.files.untrusted import MOST_VALUES
from gaugelasso.models import SpecError, Transformer, TransformerSpec
from gaugelasso.tasks import SequenceTask, Task
from gaugelasso.tasks.own import sequences

# Larger values are typing errors: no supported machine can train such a model.
_MAX_WIDTH = 1_000_000
_MAX_LAYERS = 10_000
_MAX_WEIGHTS = 1e11


@dataclass(frozen=True)
class ModelConfig:
    """[model]: the initial transformer, with the same widths in every layer."""

    width: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 0  # 0: the same as heads
    d_k: int = 32
    d_v: int = 32
    d_f: int = 256
    rope: bool = True
    rope_base: float = 10_000.0
    positions: bool = False
    norm: Literal["slow", "tied"] = "slow"
    tied_head: bool = False

    def __post_init__(self) -> None:
        for key in ("width", "heads", "d_k", "d_v", "d_f"):
            check_range(f"model.{key}", getattr(self, key), 1, _MAX_WIDTH)
        check_range("model.layers", self.layers, 1, _MAX_LAYERS)
        check_range("model.kv_heads", self.kv_heads, 0, self.heads)
        if not 0 < self.rope_base < math.inf:
            raise UserError(f"model.rope_base = {self.rope_base}: must be a finite number above 0")

    def matrix_sizes(self, task: Task) -> list[int]:
        """The numbers of elements of the weight matrices."""
        task, kv_heads = sequences(task), self.kv_heads or self.heads
        heads = [self.heads * self.d_k, kv_heads * self.d_k, kv_heads * self.d_v]
        widths = [*heads, self.heads * self.d_v, self.d_f, self.d_f, self.d_f]
        ends = [task.inputs] if self.tied_head else [task.inputs, task.outputs]
        return [self.width * each for each in (*ends, *widths * self.layers)]

    def build(self, task: Task, seed: int) -> Transformer:
        return Transformer(self.spec(task), seed)

    def spec(self, task: Task) -> TransformerSpec:
        task = sequences(task)
        try:
            spec = TransformerSpec.uniform(
                width=self.width,
                layers=self.layers,
                heads=self.heads,
                kv_heads=self.kv_heads or None,
                d_k=self.d_k,
                d_v=self.d_v,
                d_f=self.d_f,
                rope=self.rope,
                rope_base=self.rope_base,
                positions=self.positions,
                norm=self.norm,
                length=task.length,
                inputs=task.inputs,
                outputs=task.outputs,
                input_kind=task.input_kind,
                causal=task.causal,
            )
            return replace(spec, tied_head=self.tied_head)
        except SpecError as error:
            raise UserError(f"[model]: {error}") from None


def check_size(model: ModelConfig, task: SequenceTask, batch: int) -> None:
    """UserError, before anything is allocated, for a model that would take terabytes."""
    heads = model.heads * (2 * model.d_k + 2 * model.d_v)
    weights = model.width * (task.inputs + task.outputs + task.length * model.positions)
    weights += model.layers * model.width * (heads + 3 * model.d_f)
    if weights > _MAX_WEIGHTS:
        raise UserError(
            f"[model] and [task] make {weights:.2g} weights, more than the limit of "
            f"{_MAX_WEIGHTS:.0e}; lower the widths or the vocabulary"
        )
    # The structure file lists the sites of every operator, and reading it back has a limit.
    entries = model.layers * (4 * model.width + model.d_k) + 3 * model.width
    if entries > MOST_VALUES:
        raise UserError(
            f"model.layers = {model.layers} with model.width = {model.width} make a structure of "
            f"{entries:.2g} entries, more than the limit of {MOST_VALUES:.1e}; lower one of them"
        )
    check_activations(max(model.width, model.d_f, task.outputs), task.length, batch)


def check_positions(model: ModelConfig, task: SequenceTask, name: str) -> None:
    """UserError unless masked patches have learned positions.

    A masked patch is identified by its position alone, and RoPE assumes a linear order.
    """
    if task.input_kind == "masked_patches" and (model.rope or not model.positions):
        raise UserError(
            f"task {name!r} masks patches, which need learned positions: "
            "set model.positions = true and model.rope = false"
        )


def check_range(key: str, value: int, low: int, high: int) -> None:
    """UserError unless low <= value <= high."""
    if not low <= value <= high:
        raise UserError(f"{key} = {value}: must be between {low} and {high}")
