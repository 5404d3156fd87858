"""One training step on fixed tensors: forward, backward, update; plainly or as a CUDA graph.

What the trainer repeats and the benchmark measures. Knows nothing of phases or files.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from gaugelasso.compressor import Compressor
from gaugelasso.config import Config
from gaugelasso.evaluation import autocast
from gaugelasso.graph import GraphedStep
from gaugelasso.kernels import plainly
from gaugelasso.models import Transformer
from gaugelasso.tasks import TRAINING, stream_seed


class TrainingStep:
    """Load a batch, then call it. `loss` is that of the last call, still on the device."""

    def __init__(self, model: Transformer, config: Config, device: str):
        self.model, self.config, self.device = model.train(), config, device
        self.compressor = Compressor(
            model, config.target.loss, config.compress, self.probe if config.train.probe else None
        )
        self.inputs, self.targets = self._batches(0)
        self.loss = torch.zeros((), device=device)
        self._graph: GraphedStep | None = None
        self._run: Callable[[], None] = self.plain
        if device.startswith("cuda") and config.train.graph:
            self._run = self._graph = GraphedStep(self.plain)

    def batch_seed(self, step: int, micro: int = 0) -> int:
        train = self.config.train
        return stream_seed(train.seed, TRAINING, step * train.accumulate + micro)

    def _batches(self, step: int) -> tuple[Tensor, Tensor]:
        """The micro-batches of a step, stacked."""
        train, task = self.config.train, self.config.task
        pairs = [
            task.batch(train.batch, self.batch_seed(step, micro), self.device)
            for micro in range(train.accumulate)
        ]
        return torch.stack([p[0] for p in pairs]), torch.stack([p[1] for p in pairs])

    def load_(self, step: int) -> None:
        """Put this step's batch where the next call finds it."""
        inputs, targets = self._batches(step)
        self.inputs.copy_(inputs)
        self.targets.copy_(targets)

    def __call__(self) -> None:
        self._run()

    def restructured(self) -> None:
        """The model has changed shape: a capture of it is void."""
        if self._graph is not None:
            self._graph.reset()

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with plainly(not self.config.train.fused):
            with autocast(self.config, self.device):
                outputs = self.model(inputs)
            return self.config.task.loss(outputs, targets)

    def gradients(self) -> None:
        """Forward and backward over the micro-batches; reads nothing back."""
        self.loss.zero_()
        for inputs, targets in zip(self.inputs, self.targets, strict=True):
            loss = self.forward(inputs, targets) / self.config.train.accumulate
            loss.backward()
            self.loss.add_(loss.detach())

    def plain(self) -> None:
        """The whole step without a graph; reads nothing back."""
        self.gradients()
        self.compressor.update_(self.loss)

    @torch.no_grad()
    def probe(self) -> float:
        """Loss of the loaded batch, as training sees it."""
        pairs = zip(self.inputs, self.targets, strict=True)
        losses = [self.forward(inputs, targets) for inputs, targets in pairs]
        return float(sum(losses) / len(losses))
