"""A loop of the user's own, with the example's perceptron and a small task."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gaugelasso.compress.compressor import Compressor, CompressorOptions
from gaugelasso.compress.events import Event
from gaugelasso.compress.pilot import Pilot
from gaugelasso.compress.result import Result
from tests.examples import example

Perceptron = example("your_model").Perceptron
FAST = CompressorOptions(lr=0.02, interval=5)


class Loop:
    """The example's perceptron and its task. `losses` replaces the loss of some steps."""

    def __init__(self, named: float = 0.5, spoiled: dict[int, float] | None = None, **given: Any):
        self.generator = torch.Generator().manual_seed(0)
        self.teacher = Perceptron(8, 4, 3).requires_grad_(False)
        for parameter in self.teacher.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=self.generator))
        torch.manual_seed(0)
        self.model = Perceptron(8, 32, 3)
        self.held_out = torch.randn(512, 8, generator=self.generator)
        self.spoiled, self.calls = spoiled or {}, 0
        if given.get("evaluate") is True:
            given["evaluate"] = self.evaluate
        self.compressor = Compressor(self.model, named, **({"options": FAST} | given))
        assert (self.compressor.pilot is None) == ("steps" not in given and "seconds" not in given)

    @property
    def pilot(self) -> Pilot:
        assert self.compressor.pilot is not None
        return self.compressor.pilot

    def evaluate(self) -> Tensor:
        return F.mse_loss(self.model(self.held_out), self.teacher(self.held_out))

    def batch(self) -> Tensor:
        return torch.randn(64, 8, generator=self.generator)

    def loss(self, x: Tensor) -> Tensor:
        self.calls += 1
        factor = self.spoiled.get(self.compressor.steps, 1.0)
        return factor * F.mse_loss(self.model(x), self.teacher(x))

    def step(self) -> Event | None:
        x = self.batch()
        return self.compressor.step(lambda: self.loss(x))

    def run_to(self, steps: int) -> None:
        while self.compressor.steps < steps:
            self.step()

    def run(self) -> Result:
        while not self.compressor.done:
            self.step()
        return self.compressor.finish()
