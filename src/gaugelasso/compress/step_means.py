"""What a step learns of its data, averaged over its micro-batches and over the ranks.

Gradient, energies of all normalisers, loss, and whether somebody wishes to stop lie in one
vector: ranks need one exchange a step. All that comes after it, on every rank, starts from
the same bits. Knows nothing of what is done with them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gaugelasso.compress.flat import FlatStore
from gaugelasso.distributed import Team


def pairwise_sum(rows: Tensor, team: Team) -> Tensor:
    """The sum of all ranks' rows, by a tree over their order that knows of no ranks.

    Neighbours are added, then neighbours of these, an odd one waiting for the next round. A
    rank does the rounds that stay within its own rows: these are a block of all, equally long
    on every rank, so as long as their number is even.
    """
    while len(rows) > 1 and len(rows) % 2 == 0:
        rows = rows[0::2] + rows[1::2]
    rows = team.gather(rows)
    while len(rows) > 1:
        last = rows[len(rows) // 2 * 2 :]
        rows = torch.cat([rows[0:-1:2] + rows[1::2], last])
    return rows[0]


class StepMeans:
    """The means of one step of one structure; built anew when the tensors are replaced.

    `micros` says how many micro-batches of a step are told by `add_microbatch_`, if any is. If
    `canonical`, what is known of each is kept apart and summed by `pairwise_sum`: then a step's
    result is, to the last bit, the same for any number of ranks. Else a rank sums as it goes.
    """

    @staticmethod
    def extra_elements(energies: Sequence[Tensor], team: Team, canonical: bool) -> int:
        """What the store's message must hold beside the gradient."""
        shared = team.size > 1 or canonical
        return sum(energy.numel() for energy in energies) + 2 if shared else 0

    def __init__(
        self,
        store: FlatStore,
        energies: Sequence[Tensor],
        team: Team,
        micros: int,
        canonical: bool,
        stop_requested: Tensor,
    ):
        self._store, self._energies, self._team = store, list(energies), team
        self._stop_requested, self._micros, self._canonical = stop_requested, micros, canonical
        rest = store.message[len(store) :]
        self._rest: list[Tensor] = []
        if len(rest):
            sizes = [energy.numel() for energy in energies]
            self._rest = [
                part.view(like.shape)
                for part, like in zip(
                    rest.split([*sizes, 1, 1]),
                    [*energies, stop_requested, stop_requested],
                    strict=True,
                )
            ]
        rows = micros if canonical else 0
        self._rows = store.message.new_zeros(rows, len(store.message))
        # One micro-batch has nothing to be added to.
        several = micros > 1 and not canonical
        self._sums = [torch.zeros_like(energy) for energy in energies] if several else []

    def add_microbatch_(self, micro: int, loss: Tensor) -> None:
        """This rank's micro-batch of this number has been through its backward pass."""
        if self._canonical:
            self._store.collect_grads_()
            self._pack_(loss)
            self._rows[micro].copy_(self._store.message)
        elif self._sums and micro:
            torch._foreach_add_(self._sums, self._energies)
        elif self._sums:
            torch._foreach_copy_(self._sums, self._energies)

    def finish_(self, loss: Tensor) -> Tensor:
        """Gradient, energies and stop_requested become the step's means; returns that of the loss.

        `loss` is the mean of this rank's.
        """
        message = self._store.message
        if self._canonical:
            total = pairwise_sum(self._rows, self._team)
            torch.div(total, self._micros * self._team.size, out=message)
            return self._unpack_()
        self._store.collect_grads_()
        if self._sums:
            torch._foreach_copy_(self._energies, torch._foreach_div(self._sums, self._micros))
        if not self._rest:
            return loss
        self._pack_(loss)
        self._team.mean_(message)
        return self._unpack_()

    def _pack_(self, loss: Tensor) -> None:
        torch._foreach_copy_(self._rest, [*self._energies, loss.detach(), self._stop_requested])

    def _unpack_(self) -> Tensor:
        *energies, loss, stop_requested = self._rest
        torch._foreach_copy_([*self._energies, self._stop_requested], [*energies, stop_requested])
        return loss
