"""Bytes of memory per parameter: held between steps, and at the peak.

python benchmarks/memory.py            # two sizes, each in its own process
"""

import gc
import resource
import subprocess
import sys
from dataclasses import replace

import torch

from gaugelasso.config import Config
from gaugelasso.models import Transformer
from gaugelasso.training.step import TrainingStep

# Few tokens, so that activations are negligible compared to the weights.
TASK = {"name": "retrieval", "vocabulary": 512, "modulus": 7, "length": 8}
WIDTHS = (512, 768)


def measure(width: int, canonical: bool) -> None:
    """Print the number of parameters, the bytes held, and the peak of the process in bytes."""
    model = {"width": width, "layers": 4, "heads": 8, "d_k": width // 8, "d_v": width // 8}
    config = Config.from_dict({"task": TASK, "model": model | {"d_f": 4 * width}})
    train = replace(config.train, batch=1, accumulate=2, canonical=canonical, device="cpu")
    config = replace(config, train=train)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step = TrainingStep(Transformer(config.model.spec(config.task)), config, "cpu")
    for number in range(2):
        step.load_(number)
        step()
    step.compressor.event_()
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor)]
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(step.compressor.parameters, sum(held.values()), 1024 * peak)


def main() -> None:
    for canonical in (False, True):
        rows = []
        for width in WIDTHS:
            command = [sys.executable, __file__, str(width), str(int(canonical))]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            rows.append([int(part) for part in output.split()])
        # In the difference of two sizes, memory that does not depend on the size cancels.
        parameters, held, peak = (b - a for a, b in zip(*rows, strict=True))
        print(
            f"canonical {canonical}: {rows[0][0]:,} and {rows[1][0]:,} parameters, "
            f"{held / parameters:.0f} bytes held per parameter, {peak / parameters:.0f} at the peak"
        )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure(int(sys.argv[1]), sys.argv[2] == "1")
    else:
        main()
