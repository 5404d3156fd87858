"""CUDA MPS, with which processes on one GPU run side by side instead of by turns."""

import contextlib
import shutil
import subprocess
from collections.abc import Iterator


@contextlib.contextmanager
def shared_gpu(wanted: bool = True) -> Iterator[None]:
    """Run CUDA MPS meanwhile if it is wanted, and this machine has it and lets it start."""
    control = shutil.which("nvidia-cuda-mps-control") if wanted else None
    if control is None:
        yield
        return
    # One that runs already is another command's, which also ends it.
    started = subprocess.run([control, "-d"], capture_output=True).returncode == 0
    try:
        yield
    finally:
        if started:
            subprocess.run([control], input=b"quit\n", capture_output=True)
