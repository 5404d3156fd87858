"""What `compiled` looks for, in code of a kernel and in the kernels themselves."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.compiled import overwritten

LOOP = """
    %0 = scf.for %i = %c0 to %d step %c32 {
      %1 = ttg.memdesc_index %blocks[%i] : !ttg.memdesc<2x128x32xbf16>
      %2 = ttng.warp_group_dot %READ, %maps, %acc {isAsync = true}
      %3:3 = ttng.warp_group_dot_wait %2, %READ, %maps {pendings = PENDING : i32}
      %4 = ttg.memdesc_index %blocks[%j] : !ttg.memdesc<2x128x32xbf16>
      %5 = ttg.async_copy_global_to_local %at, %COPIED mask %m other %zero
"""


@pytest.mark.parametrize(
    ("read", "copied", "pending", "found"),
    [("rows", "rows", 1, ["%rows"]), ("rows", "rows", 0, []), ("1", "4", 1, [])],
    ids=["one block", "one block, waited for", "slots"],
)
def test_a_block_that_is_read_and_written(
    read: str, copied: str, pending: int, found: list[str]
) -> None:
    code = LOOP.replace("READ", read).replace("COPIED", copied).replace("PENDING", str(pending))
    assert overwritten(code) == found


def test_no_kernel_overwrites_what_a_product_reads() -> None:
    pytest.importorskip("triton")
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), *sys.path])
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compiled"],
        cwd=root, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.count("ok") == 8
