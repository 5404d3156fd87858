"""The tiles of a kernel's programs: sizes that change the time and not the result."""

from collections.abc import Sequence
from typing import NamedTuple


class Tile(NamedTuple):
    """Tokens, columns and inner channels of a program, its warps, and stages of its loads."""

    tokens: int
    columns: int
    inner: int
    warps: int = 4
    stages: int = 3

    def __str__(self) -> str:
        return f"{self.tokens}x{self.columns}x{self.inner}/{self.warps}w{self.stages}"


# Beyond this many tokens programs have large blocks.
FEW = 512
# Candidates of products of many tokens, with one sum and with two of them.
PRODUCTS = (Tile(128, 256, 64, 8, 3), Tile(128, 128, 64, 8, 3), Tile(128, 128, 64, 4, 3),
            Tile(128, 128, 32, 8, 4), Tile(128, 64, 64, 4, 3), Tile(128, 64, 32, 4, 4))  # fmt: skip
GATED = (Tile(128, 64, 32, 4, 4), Tile(128, 64, 64, 8, 3), Tile(128, 128, 64, 8, 3))
# Tokens and filters of a whole MLP of many tokens. The inner size is all that it reads.
JOINED = (Tile(128, 64, 0, 8, 2), Tile(128, 64, 0, 8, 1), Tile(128, 32, 0, 8, 3),
          Tile(128, 32, 0, 8, 2), Tile(64, 32, 0, 4, 3))  # fmt: skip
# The most sites of such an MLP: those that it reads are held in shared memory, and the sums of
# those that it writes in registers.
MOST_READ, MOST_WRITTEN = 512, 256
# Bytes of shared memory that a program has on an H200; other GPUs have less.
SHARED = 227 * 1024
# Of few tokens: programs for as many blocks of columns as there are.
SMALL = (Tile(16, 16, 128, 4, 3), Tile(16, 16, 512, 8, 2), Tile(16, 32, 256, 4, 3),
         Tile(32, 32, 128, 4, 3), Tile(64, 64, 64, 4, 4))  # fmt: skip
# Queries, keys of attention. The inner size is that of the heads, and is not chosen.
ATTENTION = (Tile(128, 64, 0, 4, 3), Tile(128, 64, 0, 4, 2), Tile(128, 32, 0, 4, 3),
             Tile(64, 64, 0, 4, 3))  # fmt: skip
# Heads that share their keys, and keys, in a step of decoding.
DECODING = (Tile(16, 64, 0, 1, 3), Tile(16, 64, 0, 2, 3), Tile(16, 64, 0, 4, 3),
            Tile(16, 128, 0, 4, 3))  # fmt: skip


def fitting(tiles: Sequence[Tile], columns: int) -> list[Tile]:
    """The tiles of which less than half would be empty, or the narrowest."""
    narrow = [each for each in tiles if each.columns < 2 * columns]
    return narrow or [min(tiles, key=lambda each: each.columns)]


def applies(tile: Tile | None, tokens: int) -> Tile | None:
    """The tile, if it was measured for few tokens and there are few, or for many and many."""
    return tile if tile is not None and (tile in SMALL) == (tokens <= FEW) else None


def joined_candidates(reads: int, writes: int, itemsize: int) -> list[Tile]:
    """The tiles that are worth compiling for a whole MLP: what is sure to be shared fits.

    That is what the tokens read, and for each stage the maps of the filters.
    """
    found = []
    for tile in JOINED:
        maps = tile.stages * tile.columns * (2 * reads + writes) if tile.stages > 1 else 0
        if itemsize * (tile.tokens * reads + maps) <= SHARED:
            found.append(tile)
    return found


def candidates(tokens: int, columns: int, gated: bool = False) -> list[Tile]:
    """The tiles that are worth measuring for a product."""
    if tokens > FEW:
        return fitting(GATED if gated else PRODUCTS, columns)
    return fitting([each for each in SMALL if each.tokens <= max(16, tokens)], columns)
