"""Seeds for data: batch k of a stream has a seed of its own, whatever ran before.

So a resumed run sees the batches it would have seen, and held-out data never meets
training data.
"""

import numpy as np

TRAINING, EVALUATION = 0, 1


def stream_seed(seed: int, stream: int, index: int) -> int:
    """A 63-bit seed for batch `index` of a stream of the run with this seed."""
    state = np.random.SeedSequence([seed, stream, index]).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))
