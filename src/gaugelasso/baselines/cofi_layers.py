"""Distillation of layers in CoFi: the stream of the student follows that of the teacher.

A layer is what has the same depth, and h [D, N] the stream after it. Some layers t of the teacher,
at equal distances, are each matched with an open layer m(t) of the student: the nearest in distance
among those before the match of the teacher's next one, from the last layer on. The distance is

    sum_t |W h_m(t) - h_t|^2 / |h_t|^2,

with a map W [D, D], learned and at first the identity, which fills in the sites that masks close.

As version 4 in the authors' code, but for three points. That has no norm below, because the streams
of BERT are normalised. Its map has a bias. And it goes on in the fine-tuning of the dense model,
where this ends with the masks. Knows nothing of schedules.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from gaugelasso.baselines.cofi_masks import Masks
from gaugelasso.models import Transformer
from gaugelasso.models.operators import Attention

# The most layers of the teacher that are matched.
MATCHED = 4


class LayerDistillation:
    """The distance of layers for one structure, and the optimizer of the map between streams."""

    def __init__(self, teacher: Transformer, rate: float):
        layers = teacher.axis_table().layers
        self._names = [owners[-1] for owners in layers]
        # What says whether a layer is open: its attention; its MLP, if it has no attention.
        self._gates = [
            next((o for o in owners if isinstance(teacher.get_submodule(o), Attention)), owners[0])
            for owners in layers
        ]
        count, device = len(self._names), teacher.sites.device
        matched = min(MATCHED, count)
        self._taught = [count * (k + 1) // matched - 1 for k in range(matched)]
        # Per token, in the unit of training work, where a forward product counts a third: all
        # streams are mapped once, the matched ones again, with a backward pass of two products.
        self.work = (count + 3 * matched) * len(teacher.sites) ** 2 / 3
        self.map = torch.eye(len(teacher.sites), device=device).requires_grad_()
        self.map.grad = torch.zeros_like(self.map)  # a CUDA graph needs fixed addresses
        self._descent = torch.optim.Adam([self.map], lr=rate, capturable=self.map.is_cuda)

    @contextmanager
    def watched(self, model: Transformer) -> Iterator[list[Tensor]]:
        """Within the context a forward pass of the model leaves the streams in the list."""
        streams: list[Tensor] = []
        hooks = [
            model.get_submodule(name).register_forward_hook(
                # A copy, because the next operator writes to the stream in place.
                lambda _module, _inputs, stream: streams.append(stream.clone())
            )
            for name in self._names
        ]
        try:
            yield streams
        finally:
            for hook in hooks:
                hook.remove()

    def is_open(self, masks: Masks, values: Tensor) -> Tensor:
        """For each layer, whether the sampled mask of its attention is above 0."""
        by = {part.owner: part.of(values) for part in masks.parts if part.family in ("mha", "ffn")}
        return torch.cat([by[owner] for owner in self._gates]) > 0

    def distance(
        self, student: Sequence[Tensor], teacher: Sequence[Tensor], is_open: Tensor
    ) -> Tensor:
        """The sum over matched layers, each relative to the teacher's."""
        wanted = torch.stack([teacher[k] for k in self._taught]).float()
        streams = torch.stack(list(student)).float()
        power = wanted.square().mean((1, 2)).clamp_min(1e-12)
        with torch.no_grad():
            mapped = self.map @ streams
            every = [(mapped - one).square().mean((1, 2)) for one in wanted]
            match = self._matches(torch.stack(every), is_open)
        # Mapped once more, so that only what is matched has a backward pass.
        chosen = self.map @ streams.index_select(0, match)
        return ((chosen - wanted).square().mean((1, 2)) / power).sum()

    @staticmethod
    def _matches(distances: Tensor, is_open: Tensor) -> Tensor:
        """[matched]: the student's layer of each; decided on the device, for CUDA graphs.

        Where no open layer is left before the match of the next one, that one serves again.
        """
        count = len(is_open)
        number = torch.arange(count, device=is_open.device)
        last = number.new_full((), count)
        found = []
        for row in distances.flip(0):
            allowed = is_open & (number < last)
            nearest = row.where(allowed, torch.inf).argmin()
            last = torch.where(allowed.any(), nearest, last.clamp(max=count - 1))
            found.append(last)
        return torch.stack(found).flip(0)

    def step_(self) -> None:
        """Move the map by its gradient, and clear this. Numbers that are not finite count as 0."""
        assert self.map.grad is not None
        self.map.grad.nan_to_num_(0.0, 0.0, 0.0)
        self._descent.step()
        self._descent.zero_grad(set_to_none=False)

    # --- state, for checkpoints ---------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """All that the next step depends on."""
        state = self._descent.state.get(self.map, {})
        return {"map": self.map.detach(), **{name: torch.as_tensor(t) for name, t in state.items()}}

    def load_(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `state` gave."""
        kept = {name: tensor.to(self.map.device) for name, tensor in tensors.items()}
        with torch.no_grad():
            self.map.copy_(kept.pop("map"))
        if kept:
            self._descent.state[self.map] = {name: t.clone() for name, t in kept.items()}
