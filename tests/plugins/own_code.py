"""Code of a user, written into files: a task, a regression task and a perceptron."""

from pathlib import Path

TASK = '''
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Copying:
    """The label at every position is the token there."""

    vocabulary: int = 8
    length: int = 6
    order: Literal["same", "reversed"] = "same"

    metric_name: ClassVar[str] = "accuracy"
    metric_lower_is_better: ClassVar[bool] = False
    input_kind: ClassVar[str] = "tokens"
    causal: ClassVar[bool] = True
    inputs = property(lambda self: self.vocabulary)
    outputs = property(lambda self: self.vocabulary)

    def __post_init__(self):
        if self.vocabulary < 2:
            raise ValueError(f"a vocabulary of {self.vocabulary}")

    def batch(self, size, draw, device):
        generator = torch.Generator(device).manual_seed(draw.seed)
        tokens = torch.randint(self.vocabulary, (size, self.length), generator=generator)
        return tokens, tokens if self.order == "same" else self.vocabulary - 1 - tokens

    def loss(self, outputs, targets):
        return F.cross_entropy(outputs.flatten(0, 1).float(), targets.flatten())

    def metric(self, outputs, targets):
        return (outputs.argmax(-1) == targets).float().mean()


@dataclass
class Regression:
    """No sequences: a vector in, a vector out."""

    inputs: int = 4
    outputs: int = 2

    metric_name: ClassVar[str] = "mse"
    metric_lower_is_better: ClassVar[bool] = True

    def batch(self, size, draw, device):
        generator = torch.Generator(device).manual_seed(draw.seed)
        x = torch.randn(size, self.inputs, generator=generator)
        return x, x[:, : self.outputs].relu()

    def loss(self, outputs, targets):
        return F.mse_loss(outputs, targets)

    metric = loss


class NoDataclass:
    pass


@dataclass(frozen=True)
class Incomplete:
    metric_name: ClassVar[str] = "accuracy"


@dataclass(frozen=True)
class WithList(Copying):
    widths: list[int] = None


@dataclass(frozen=True)
class Demanding(Copying):
    level: float = field(kw_only=True)
'''

MODEL = """
from beside import SCALE  # a file in the same folder

import torch
import torch.nn.functional as F
from torch import nn

from gaugelasso import Axis, AxisTable, Compressible, Cost, Slot


class Perceptron(Compressible):
    def __init__(self, inputs: int, hidden: int, outputs: int):
        super().__init__()
        self.up = nn.Parameter(torch.randn(inputs, hidden) * SCALE)
        self.down = nn.Parameter(torch.randn(hidden, outputs) * SCALE)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        return F.relu(x @ self.up) @ self.down

    def axis_table(self):
        hidden = Axis("hidden", "hidden", (Slot("up", 1),), (Slot("down", 0),), owner="all")
        return AxisTable(
            (hidden,),
            (Slot("up", 0), Slot("down", 1)),
            matrices={"up": 1, "down": 1},
            costs=(Cost("matmul", self.up.shape[0] + self.down.shape[1], ("hidden",)),),
            required=frozenset({"all"}),
        )

    def structure(self):
        (inputs, hidden), outputs = self.up.shape, self.down.shape[1]
        return {"inputs": inputs, "hidden": hidden, "outputs": outputs}

    def counts(self):
        return {"units": self.up.shape[1]}


def build(task, hidden: int = 16, note: str = "plain"):
    return Perceptron(task.inputs, hidden, task.outputs)


def broken(hidden: int):
    return nn.Linear(hidden, hidden)


def raising():
    raise RuntimeError("no weights today")


class Forgetful(Perceptron):
    def structure(self):
        return {"inputs": 4, "hidden": 1, "outputs": 2}


def local(task):
    class Local(Perceptron):
        pass

    return Local(4, 16, 2)


NUMBER = 3
"""

CONFIG = """
[task]
module = "my_tasks.py:Regression"

[model]
module = "my_models.py:build"
hidden = 24

[target]
loss = 0.5
hold = "pressed"

[compress]
drop_tolerance = 1e9
lr = 0.02
interval = 5
trust = 4.0

[train]
seed = 3
steps = 40
warmup = 4
cooldown = 10
batch = 16
log_every = 5
eval_every = 10
eval_batches = 1
final_batches = 2
checkpoint_every = 10
device = "cpu"
"""


def write_code(folder: Path) -> Path:
    """Write the user's files into a folder and return the config beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "my_tasks.py").write_text(TASK)
    (folder / "my_models.py").write_text(MODEL)
    (folder / "beside.py").write_text("SCALE = 0.5\n")
    (folder / "own.toml").write_text(CONFIG)
    return folder / "own.toml"
