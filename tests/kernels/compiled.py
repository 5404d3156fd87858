"""What Triton makes of the kernels for an H200: compiled, never run. Needs no GPU.

    python -m tests.kernels.compiled

One defect is looked for, which no interpreter shows and which on a GPU depends on timing: a block
in shared memory that a product still reads (`warp_group_dot`, which runs by itself) while the next
block is copied over it.
"""

import os
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

# Threads and elements: what the layouts of a product need to be those of many tokens.
TOKENS, WIDTH, SITES = 1024, 48, 24


class _Target:
    """A driver of a GPU that is not there."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def overwritten(code: str) -> list[str]:
    """The blocks of a kernel's code in `ttgir` that are copied to while a product reads them."""
    found = []
    for loop in re.split(r"scf\.for", code)[1:]:
        # Of a product that is waited for at once, nothing is left to be read.
        waits = re.findall(r"warp_group_dot_wait [^\n]*pendings = (\d+)", loop)
        if not waits or int(waits[0]) == 0:
            continue
        for operands in re.findall(r"warp_group_dot (%[\w#]+), (%[\w#]+),", loop):
            # A block with slots is another name for each of them: one that is copied to by the
            # name that the product reads has a single one.
            found += [
                each
                for each in operands
                if re.search(rf"async_copy_global_to_local %[\w#]+, {each}\b", loop)
            ]
    return found


def kernels() -> Iterator[tuple[str, Any]]:
    """Launches of kernels whose products run by themselves."""
    from gaugelasso.kernels.gpu import mixing, mlp, products
    from gaugelasso.kernels.tiles import ATTENTION, GATED, JOINED, PRODUCTS, SMALL

    def empty(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16)

    sites, weight = torch.arange(SITES), torch.ones(SITES)
    maps, down = empty(SITES, 64), empty(32, SITES)
    few, many = empty(WIDTH, 64).T, empty(WIDTH, TOKENS).T
    read = (sites, weight, maps, 0.0)
    yield "fused", lambda: products.read_product(many, *read, tile=PRODUCTS[0])
    yield "fused, few", lambda: products.read_product(few, *read, tile=SMALL[-1])
    yield "fused, gated", lambda: products.read_product(many, *read, gated=True, tile=GATED[0])
    yield "window", lambda: products.read_product(many, *read, first=0, tile=PRODUCTS[1])
    yield "write", lambda: products.product_write_(many, empty(TOKENS, 32), down, sites)
    yield "pairs", lambda: products.paired_product(empty(TOKENS, SITES), maps, PRODUCTS[0])
    yield "joined", lambda: mlp.mlp_(many, (sites, weight, maps), (down, sites), 0.0, JOINED[2])
    rows, angles = empty(2 * 283, 192), (empty(283, 16),) * 2
    yield (
        "attention",
        lambda: mixing.attend_rows(rows, 2, (2, 2), (32, 32), angles, True, ATTENTION[0]),
    )


def main() -> None:
    os.environ["TRITON_INTERPRET"] = "0"  # which Triton reads when it is imported
    from triton.runtime import driver, jit

    driver.set_active(_Target())
    run, codes = jit.JITFunction.run, []

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        kernel = run(self, *arguments, grid=grid, warmup=True, **named)
        codes.append(kernel.asm["ttgir"])
        return kernel

    jit.JITFunction.run = compile_only
    wrong = []
    for name, launch in kernels():
        codes.clear()
        launch()
        assert codes, f"{name} was not compiled"
        blocks = [block for code in codes for block in overwritten(code)]
        print(f"{name}: {', '.join(blocks) or 'ok'}", flush=True)
        wrong += blocks
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
