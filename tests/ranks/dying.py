"""What torchrun starts in the tests: the command line, on which something befalls one rank once.

python -m tests.ranks.dying KIND RANK STEP train CONFIG ...
"""

import contextlib
import os
import sys

from gaugelasso import cli
from tests.ranks.crews import Fault

if __name__ == "__main__":
    kind, rank, step, *rest = sys.argv[1:]
    sys.argv = ["gaugelasso", *rest]
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    fault = Fault(kind, int(rank), int(step))  # type: ignore[arg-type]
    with fault.befalling(int(os.environ["RANK"])) if first else contextlib.nullcontext():
        cli.main()
