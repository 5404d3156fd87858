"""When channels are exchanged, until which step new ones may not be dropped, and growth's seed.

A part of the state that checkpoints hold. Knows nothing of tensors or utilities.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

# Far apart from each other, so that neighbouring seeds and steps share no random numbers.
_STRIDE = 1_000_003


class BirthRecord:
    """One step number per index and axis: the index is protected before that step; 0 if never.

    `every` is the number of steps between exchanges, and the length of the protection. `seed` and
    the number of steps determine the random numbers of a growth.
    """

    def __init__(self, every: int, widths: Mapping[str, int], seed: int, device: torch.device):
        self.every, self._device = every, device
        self.seed = torch.tensor(seed % 2**31, device=device)
        self._last = torch.tensor(0, device=device)  # the step of the last exchange
        self._until: dict[str, Tensor] = {}
        self.fit_(widths)

    def tensors(self) -> dict[str, Tensor]:
        """The record by name, for checkpoints."""
        grace = {f"grace.{name}": until for name, until in self._until.items()}
        return {"growth_seed": self.seed, "exchanged_at": self._last, **grace}

    def exchange_due_(self, step: int, left: float) -> bool:
        """Whether an exchange is due at the event of this step; it counts as the last one then.

        With fewer steps `left` in the run than the protection takes, new indices would come to
        nothing, and stay: none is due then.
        """
        due = step - int(self._last) >= self.every and left >= self.every
        if due:
            self._last.fill_(step)
        return due

    def generator(self, step: int) -> torch.Generator:
        """The random numbers of a growth at this step."""
        return torch.Generator().manual_seed(int(self.seed) * _STRIDE + step)

    def protected(self, step: int) -> dict[str, Tensor]:
        """Axis name -> the indices that may not be dropped at this step, on the CPU."""
        return {name: until.cpu() > step for name, until in self._until.items()}

    def cut_(self, keeps: Mapping[str, Tensor]) -> None:
        """Follow a cut. Vectors are replaced, so that `snapshot` is a reference."""
        for name, keep in keeps.items():
            if name in self._until:
                self._until[name] = self._until[name][keep.to(self._device)]

    def grow_(self, births: Mapping[str, int], step: int) -> None:
        """Protect new indices at the ends of axes, born at this step."""
        for name, number in births.items():
            new = torch.full((number,), step + self.every, device=self._device)
            self._until[name] = torch.cat([self._until[name], new])

    def fit_(self, widths: Mapping[str, int]) -> None:
        """Have one number per index: none for axes that are gone, zeros where a width differs.

        Zeros are appended for a split; any other new width is that of a state to be loaded.
        """
        old, self._until = self._until, {}
        for name, size in widths.items():
            known = old.get(name, torch.empty(0, dtype=torch.long, device=self._device))[:size]
            zeros = known.new_zeros(size - len(known))
            self._until[name] = torch.cat([known, zeros])

    def snapshot(self) -> dict[str, Tensor]:
        return dict(self._until)

    def restore_(self, saved: Mapping[str, Tensor]) -> None:
        self._until = dict(saved)
