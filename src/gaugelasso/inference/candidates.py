"""Which forms of an operator are worth measuring, by device, sizes and order of the stream."""

from collections.abc import Sequence

from gaugelasso.inference.folding import Form, StreamOrder
from gaugelasso.inference.stream import ReadForm, WriteForm
from gaugelasso.kernels.tiles import ATTENTION, DECODING, FEW, Tile

# Reads whose product is a kernel with tiles.
TILED = ("fused", "scaled", "fused_window", "scaled_window", "staged_gated")


def attention_forms(gpu: bool, kernels: bool, length: int) -> list[Form]:
    """The forms of attention that are worth measuring, with their tiles."""
    if not gpu:
        return [Form(attention="sdpa"), Form(attention="blocks")]
    if not kernels:
        return [Form(attention="sdpa")]
    if length == 1:
        tiles: Sequence[Tile | None] = (None, *DECODING)
        return [Form(attention="narrow", attention_tile=tile) for tile in tiles]
    forms = [Form(attention="sdpa"), Form(attention="cudnn"), Form(attention="narrow")]
    return forms + [Form(attention="direct", attention_tile=tile) for tile in ATTENTION]


def read_forms(kernels: bool, order: StreamOrder, tokens: int, gated: bool) -> list[ReadForm]:
    """The forms of a read that are worth measuring; `gated` where SwiGLU follows."""
    if not kernels:
        return ["gather", "window"]
    few = tokens <= FEW
    staged: list[ReadForm] = ["staged", "staged_gated"] if gated and not few else ["staged"]
    if order == "sites":  # any site is a contiguous row
        return ["fused", *staged] if few else ["fused", "scaled", *staged]
    if few:
        return ["fused", "fused_window", *staged]
    return ["fused_window", "scaled_window", *staged]


def write_forms(gpu: bool, kernels: bool) -> list[WriteForm]:
    """The forms of a write that are worth measuring."""
    forms: list[WriteForm] = ["scatter", "window"]
    return forms + (["fused"] if kernels else [] if gpu else ["spread"])


def label(name: str, tile: Tile | None) -> str:
    """What a form is called in the timings."""
    return name if tile is None else f"{name} {tile}"
