"""What torchrun starts in the tests: the command line, on which each time something befalls a rank.

python -m tests.distributed.dying '[["kill", 2, 17]]' train CONFIG ...
"""

import contextlib
import json
import os
import sys

from gaugelasso import cli
from tests.distributed.crews import Fault

if __name__ == "__main__":
    faults = [Fault(*fault) for fault in json.loads(sys.argv.pop(1))]
    attempt, rank = (int(os.environ[name]) for name in ("TORCHELASTIC_RESTART_COUNT", "RANK"))
    with faults[attempt].befalling(rank) if attempt < len(faults) else contextlib.nullcontext():
        cli.main()
