"""One training step on fixed tensors: forward, backward, update; plainly or as a CUDA graph.

What the trainer repeats and the benchmark measures. Knows nothing of phases or files.
"""

import torch
from torch import Tensor

from gaugelasso.compress.compressor import Compressor
from gaugelasso.compress.cuda_graph import GraphedStep
from gaugelasso.compress.step_means import pairwise_sum
from gaugelasso.config import Config
from gaugelasso.distributed import ALONE, Team
from gaugelasso.errors import UserError
from gaugelasso.kernels import reference_kernels
from gaugelasso.models import Transformer
from gaugelasso.tasks import Draw
from gaugelasso.training.evaluation import autocast


class TrainingStep:
    """Load a batch, then call it. `loss` is that of the last call, still on the device.

    A step has `train.accumulate` micro-batches, the same whatever the number of ranks, and
    each rank of the team does a block of them.
    """

    def __init__(self, model: Transformer, config: Config, device: str, team: Team = ALONE):
        self.model, self.config, self.device = model.train(), config, device
        self.team, self.micros = team, microbatches_of(config, team)
        graph = device.startswith("cuda") and config.train.graph
        probe = self.probe if config.train.probe else None
        self.compressor = Compressor(
            model,
            config.target.loss,
            config.compress,
            probe,
            graph,
            team,
            len(self.micros),
            config.train.canonical,
            config.target.fma,
        )
        self.inputs, self.targets = self._batches(0)
        self.loss = torch.zeros((), device=device)
        self._probed = torch.zeros_like(self.loss)
        self._side = torch.cuda.Stream() if device.startswith("cuda") else None
        self._ahead: tuple[int, tuple[Tensor, Tensor]] | None = None
        self._step, self._probe = (GraphedStep(work, graph) for work in (self.plain, self._look))
        self._rebuilds = self.compressor.rebuilds
        self._parameters = self.compressor.parameters

    def draw(self, step: int, micro: int = 0) -> Draw:
        train = self.config.train
        return Draw(train.seed, step * train.accumulate + micro)

    def _batches(self, step: int) -> tuple[Tensor, Tensor]:
        """This rank's micro-batches of a step, stacked."""
        train, task = self.config.train, self.config.task
        pairs = [
            task.batch(train.batch, self.draw(step, micro), self.device) for micro in self.micros
        ]
        return torch.stack([p[0] for p in pairs]), torch.stack([p[1] for p in pairs])

    def load_(self, step: int) -> None:
        """Put this step's batch where the next call finds it."""
        if self._side is None:
            inputs, targets = self._batches(step)
        else:
            inputs, targets = self._fetch(step, self._side)
        self.inputs.copy_(inputs)
        self.targets.copy_(targets)

    def _fetch(self, step: int, side: torch.cuda.Stream) -> tuple[Tensor, Tensor]:
        """This step's batch, made while the last step ran; the next one's is begun."""
        here = torch.cuda.current_stream()
        if self._ahead and self._ahead[0] == step:
            batch = self._ahead[1]
        else:
            batch = self._batches(step)
            side.wait_stream(here)  # a task may have set itself up with the first batch
        here.wait_stream(side)
        with torch.cuda.stream(side):
            self._ahead = step + 1, self._batches(step + 1)
        for tensor in batch:
            tensor.record_stream(here)
        return batch

    def _follow_structure(self) -> None:
        """Forget captures of a structure that is no more."""
        if self._rebuilds != self.compressor.rebuilds:
            self._rebuilds = self.compressor.rebuilds
            for graph in (self._step, self._probe):
                graph.reset()

    def _give_back(self) -> None:
        """Memory that a larger structure needed, once it is a good part of it.

        Not amid an event: what it cuts is still there, to be put back if the batch misses it.
        """
        if self.compressor.parameters < 0.8 * self._parameters:
            self._parameters = self.compressor.parameters
            for graph in (self._step, self._probe):
                graph.reset(release=True)
            if self._side is not None:
                torch.cuda.empty_cache()

    def __call__(self) -> None:
        self._follow_structure()
        self._give_back()
        self._step()

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with reference_kernels(not self.config.train.fused):
            with autocast(self.config, self.device):
                outputs = self.model(inputs)
            return self.config.task.loss(outputs, targets)

    def gradients(self) -> None:
        """Forward and backward over the micro-batches; reads nothing back."""
        self.loss.zero_()
        # Kept apart, micro-batches are divided by their number after they are summed.
        share = 1 if self.config.train.canonical else len(self.micros)
        pairs = zip(self.inputs, self.targets, strict=True)
        for number, (inputs, targets) in enumerate(pairs):
            loss = self.forward(inputs, targets)
            if share > 1:
                loss = loss / share
            loss.backward()
            self.compressor.add_microbatch_(number, loss)
            self.loss.add_(loss.detach())

    def plain(self) -> None:
        """The whole step without a graph; reads nothing back."""
        self.gradients()
        with reference_kernels(not self.config.train.fused):
            self.loss.copy_(self.compressor.update_(self.loss))

    def probe(self) -> float:
        """Loss of the loaded batch, of all ranks', as training sees it."""
        self._follow_structure()
        self._probe()
        return float(self._probed)

    @torch.no_grad()
    def _look(self) -> None:
        pairs = zip(self.inputs, self.targets, strict=True)
        losses = [self.forward(inputs, targets) for inputs, targets in pairs]
        total = pairwise_sum(torch.stack(losses), self.team)
        self._probed.copy_(total / self.config.train.accumulate)


def microbatches_of(config: Config, team: Team) -> range:
    """The numbers of the micro-batches that are this rank's."""
    number, over = divmod(config.train.accumulate, team.size)
    if over:
        raise UserError(
            f"train.accumulate = {config.train.accumulate} micro-batches cannot be shared out "
            f"equally to {team.size} ranks; make it a multiple of {team.size}"
        )
    return range(team.rank * number, (team.rank + 1) * number)
