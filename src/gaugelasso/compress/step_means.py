"""The measurements of a step, averaged over its micro-batches and over the ranks.

Gradient, energies of all normalisers, loss and the team's stop flag are one vector, so ranks
exchange once a step. After the exchange every rank continues from the same bits. Knows nothing
of how the measurements are used.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gaugelasso.compress.flat import FlatStore
from gaugelasso.compress.options import ExecutionOptions
from gaugelasso.distributed import Team


def pairwise_sum(rows: Tensor, team: Team) -> Tensor:
    """The sum of all ranks' rows, by a binary tree that does not depend on the number of ranks.

    Neighbours are added, then their sums, and so on; an odd last row waits for the next round.
    Every rank holds a block of equal length, so it does the rounds on its own as long as its
    number of rows is even.
    """
    while len(rows) > 1 and len(rows) % 2 == 0:
        rows = rows[0::2] + rows[1::2]
    rows = team.gather(rows)
    while len(rows) > 1:
        last = rows[len(rows) // 2 * 2 :]
        rows = torch.cat([rows[0:-1:2] + rows[1::2], last])
    return rows[0]


class StepMeans:
    """The means of one step, for one structure; built again when the tensors are replaced.

    With several micro-batches, `add_microbatch_` takes each of them in. In canonical order the
    micro-batches are kept apart and summed by `pairwise_sum`: then the result of a step has the
    same bits for any number of ranks. Otherwise each rank accumulates its own sum.
    """

    @staticmethod
    def extra_elements(energies: Sequence[Tensor], team: Team, execution: ExecutionOptions) -> int:
        """The number of elements that the store's message needs beside the gradient."""
        exchanged = team.size > 1 or execution.canonical
        return sum(energy.numel() for energy in energies) + 2 if exchanged else 0

    def __init__(
        self,
        store: FlatStore,
        energies: Sequence[Tensor],
        team: Team,
        execution: ExecutionOptions,
    ):
        self._store, self._energies, self._team = store, list(energies), team
        self._micros, self._canonical = execution.microbatches, execution.canonical
        self._stop_flag = team.stop_flag(store.weight.device)
        extra = store.message[len(store) :]
        self._extra: list[Tensor] = []
        if len(extra):
            sizes = [energy.numel() for energy in energies]
            self._extra = [
                part.view(like.shape)
                for part, like in zip(
                    extra.split([*sizes, 1, 1]),
                    [*energies, self._stop_flag, self._stop_flag],
                    strict=True,
                )
            ]
        rows = self._micros if self._canonical else 0
        self._rows = store.message.new_zeros(rows, len(store.message))
        # A single micro-batch needs no sums.
        several = self._micros > 1 and not self._canonical
        self._sums = [torch.zeros_like(energy) for energy in energies] if several else []

    def add_microbatch_(self, micro: int, loss: Tensor) -> None:
        """Take in this rank's micro-batch of this number, after its backward pass."""
        if self._canonical:
            self._store.collect_grads_()
            self._pack_(loss)
            self._rows[micro].copy_(self._store.message)
        elif self._sums and micro:
            torch._foreach_add_(self._sums, self._energies)
        elif self._sums:
            torch._foreach_copy_(self._sums, self._energies)

    def finish_(self, loss: Tensor) -> Tensor:
        """Replace gradient, energies and stop flag by their means; returns the mean loss.

        `loss` is the mean over this rank's micro-batches.
        """
        message = self._store.message
        if self._canonical:
            total = pairwise_sum(self._rows, self._team)
            torch.div(total, self._micros * self._team.size, out=message)
            return self._unpack_()
        self._store.collect_grads_()
        if self._sums:
            torch._foreach_copy_(self._energies, torch._foreach_div(self._sums, self._micros))
        if not self._extra:
            return loss
        self._pack_(loss)
        self._team.mean_(message)
        return self._unpack_()

    def _pack_(self, loss: Tensor) -> None:
        torch._foreach_copy_(self._extra, [*self._energies, loss.detach(), self._stop_flag])

    def _unpack_(self) -> Tensor:
        *energies, loss, stop_flag = self._extra
        torch._foreach_copy_([*self._energies, self._stop_flag], [*energies, stop_flag])
        return loss
