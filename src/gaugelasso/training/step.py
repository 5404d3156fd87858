"""One training step on fixed tensors: forward, backward, update; eagerly or as a CUDA graph.

The trainer repeats it and the benchmark measures it. Knows nothing of phases or files.
"""

import torch
from torch import Tensor

from gaugelasso.axes import Compressible
from gaugelasso.compress.compressor import Compressor
from gaugelasso.compress.options import ExecutionOptions
from gaugelasso.compress.step_means import pairwise_sum
from gaugelasso.config import Config
from gaugelasso.distributed import ALONE, Team
from gaugelasso.errors import UserError
from gaugelasso.kernels import reference_kernels
from gaugelasso.kernels.cuda_graph import GraphedStep
from gaugelasso.tasks import Draw
from gaugelasso.training.distillation import distillation_of
from gaugelasso.training.evaluation import autocast


class TrainingStep:
    """Load a batch with `load_`, then call the step. `loss` is the last loss, on the device.

    A step has `train.accumulate` micro-batches for any number of ranks. Each rank of the team
    does a block of them. `first` is the number of micro-batches that were drawn before the run.
    """

    def __init__(
        self, model: Compressible, config: Config, device: str, team: Team = ALONE, first: int = 0
    ):
        self.model, self.config, self.device, self._first = model.train(), config, device, first
        self.team, self.micros = team, microbatches_of(config, team)
        self._distillation = distillation_of(config, device)
        graph = device.startswith("cuda") and config.train.graph
        self.compressor = Compressor(
            model,
            0.0 if (named := config.target.named) is None else named,  # until a course sets it
            config.compress,
            probe=self.probe if config.train.probe else None,
            fma_target=config.target.fma,
            team=team,
            execution=ExecutionOptions(graph, len(self.micros), config.train.canonical),
        )
        self.inputs, self.targets = self._batches(0)
        self.loss = torch.zeros((), device=device)
        self._probed = torch.zeros_like(self.loss)
        self._side = torch.cuda.Stream() if device.startswith("cuda") else None
        self._ahead: tuple[int, tuple[Tensor, Tensor]] | None = None
        self._step, self._probe = (GraphedStep(work, graph) for work in (self.plain, self._measure))
        self._rebuilds = self.compressor.state.rebuilds
        self._parameters = self.compressor.parameters

    @property
    def extra_work(self) -> float:
        """What a step does for one token beside the model's own work: a teacher's forward pass."""
        return 0.0 if self._distillation is None else self._distillation.work

    # --- what a checkpoint keeps ------------------------------------------------------------

    @property
    def steps(self) -> int:
        """The steps done."""
        return self.compressor.steps

    def state_tensors(self) -> dict[str, Tensor]:
        """Everything except the model that the next step depends on."""
        return self.compressor.state_tensors()

    def load_state_tensors_(self, tensors: dict[str, Tensor], steps: int) -> None:
        """Take over what `state_tensors` gave; the model already has the saved structure."""
        self.compressor.load_state_tensors_(tensors, steps)

    # --- batches ----------------------------------------------------------------------------

    def draw(self, step: int, micro: int = 0) -> Draw:
        train = self.config.train
        return Draw(train.seed, self._first + step * train.accumulate + micro)

    def _batches(self, step: int) -> tuple[Tensor, Tensor]:
        """This rank's micro-batches of a step, stacked: inputs and targets."""
        train, task = self.config.train, self.config.task
        pairs = [
            task.batch(train.batch, self.draw(step, micro), self.device) for micro in self.micros
        ]
        return torch.stack([p[0] for p in pairs]), torch.stack([p[1] for p in pairs])

    def load_(self, step: int) -> None:
        """Copy this step's batch to the tensors that the next call reads."""
        if self._side is None:
            inputs, targets = self._batches(step)
        else:
            inputs, targets = self._fetch(step, self._side)
        self.inputs.copy_(inputs)
        self.targets.copy_(targets)

    def _fetch(self, step: int, side: torch.cuda.Stream) -> tuple[Tensor, Tensor]:
        """This step's batch, made during the last step; starts to make the next one's."""
        here = torch.cuda.current_stream()
        if self._ahead and self._ahead[0] == step:
            batch = self._ahead[1]
        else:
            batch = self._batches(step)
            side.wait_stream(here)  # the first batch may have initialised the task on this stream
        here.wait_stream(side)
        with torch.cuda.stream(side):
            self._ahead = step + 1, self._batches(step + 1)
        for tensor in batch:
            tensor.record_stream(here)
        return batch

    def _follow_structure(self) -> None:
        """Drop the CUDA graphs if the structure has changed since they were captured."""
        if self._rebuilds != self.compressor.state.rebuilds:
            self._rebuilds = self.compressor.state.rebuilds
            for graph in (self._step, self._probe):
                graph.reset()

    def _release_memory(self) -> None:
        """Release the memory of a larger structure, once it is a good part of all memory.

        Not during an event: the guard may still restore the tensors that the event cuts.
        """
        if self.compressor.parameters < 0.8 * self._parameters:
            self._parameters = self.compressor.parameters
            for graph in (self._step, self._probe):
                graph.reset(release=True)
            if self._side is not None:
                torch.cuda.empty_cache()

    def __call__(self) -> None:
        self._follow_structure()
        self._release_memory()
        self._step()

    def forward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The outputs of the model, and their loss."""
        with reference_kernels(not self.config.train.fused):
            with autocast(self.config, self.device):
                outputs = self.model(inputs)
            return outputs, self.config.task.loss(outputs, targets)

    def losses(self, inputs: Tensor, targets: Tensor, micro: int) -> tuple[Tensor, Tensor]:
        """The loss of this rank's micro-batch `micro`, and what is minimised."""
        outputs, loss = self.forward(inputs, targets)
        if self._distillation is None:
            return loss, loss
        with reference_kernels(not self.config.train.fused):
            return loss, self._distillation.minimised(inputs, targets, outputs, loss)

    def gradients(self) -> None:
        """Forward and backward over the micro-batches; reads nothing back to the host."""
        self.loss.zero_()
        # In canonical order the division by the number of micro-batches follows their sum.
        share = 1 if self.config.train.canonical else len(self.micros)
        pairs = zip(self.inputs, self.targets, strict=True)
        for number, (inputs, targets) in enumerate(pairs):
            loss, minimised = self.losses(inputs, targets, number)
            if share > 1:
                loss, minimised = loss / share, minimised / share
            minimised.backward()
            self.add_gradients_(1 / share)
            self.compressor.device_step.add_microbatch_(number, loss)
            self.loss.add_(loss.detach())

    def add_gradients_(self, share: float) -> None:
        """Add `share` of gradients that are not the loss's, after a backward pass; here none."""

    def plain(self) -> None:
        """The whole step without a CUDA graph; reads nothing back to the host."""
        self.gradients()
        with reference_kernels(not self.config.train.fused):
            self.loss.copy_(self.compressor.device_step.update_(self.loss))

    def probe(self) -> float:
        """Loss of the loaded batch, averaged over all ranks, in training precision."""
        self._follow_structure()
        self._probe()
        return float(self._probed)

    @torch.no_grad()
    def _measure(self) -> None:
        pairs = zip(self.inputs, self.targets, strict=True)
        losses = [self.forward(inputs, targets)[1] for inputs, targets in pairs]
        total = pairwise_sum(torch.stack(losses), self.team)
        self._probed.copy_(total / self.config.train.accumulate)


def microbatches_of(config: Config, team: Team) -> range:
    """The numbers of this rank's micro-batches."""
    number, rest = divmod(config.train.accumulate, team.size)
    if rest:
        raise UserError(
            f"train.accumulate = {config.train.accumulate} micro-batches cannot be divided "
            f"equally among {team.size} ranks; make it a multiple of {team.size}"
        )
    return range(team.rank * number, (team.rank + 1) * number)
