"""Which batch is asked for: batch k of a stream, whatever ran before.

So a resumed run sees the batches it would have seen, and held-out data never meets
training data.
"""

from dataclasses import dataclass

import numpy as np

TRAINING, EVALUATION = 0, 1


@dataclass(frozen=True)
class Draw:
    """Batch `index` of a stream of the run with seed `run`.

    A task that draws from a distribution needs `seed` alone. One over finite data keeps
    to the part that `held_out` names, and may go through it in the order of `index`.
    """

    run: int
    index: int = 0
    stream: int = TRAINING

    @property
    def seed(self) -> int:
        """63 bits of its own."""
        state = np.random.SeedSequence([self.run, self.stream, self.index])
        return int(state.generate_state(1, np.uint64)[0] >> np.uint64(1))

    @property
    def held_out(self) -> bool:
        return self.stream == EVALUATION
