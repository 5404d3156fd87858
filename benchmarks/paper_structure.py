"""Writes charlm-12l-paper.json: the structure of the paper's per-layer table (12L, seed 42).

The table gives widths, but not which residual sites an operator reads and writes. Here the sites
are spread evenly, with another start in each layer.

    python benchmarks/paper_structure.py
"""

import dataclasses
import json
from pathlib import Path

from gaugelasso import TransformerSpec
from gaugelasso.models import AttentionSpec, MlpSpec

SITES = 571
# Per layer: d_ai, RoPE pairs, d_v, d_ao, d_mi, d_f, d_mo; six heads everywhere.
LAYERS = [
    (19, 10, 3, 8, 82, 212, 78),
    (68, 24, 24, 186, 78, 250, 63),
    (121, 21, 31, 211, 204, 900, 187),
    (111, 15, 28, 134, 157, 384, 58),
    (118, 15, 25, 148, 270, 894, 105),
    (79, 10, 15, 76, 172, 364, 78),
    (117, 15, 25, 113, 134, 226, 69),
    (172, 34, 41, 222, 257, 613, 89),
    (147, 30, 26, 110, 148, 129, 5),
    (85, 10, 13, 66, 404, 1141, 164),
    (113, 10, 23, 102, 329, 873, 101),
    (55, 11, 4, 13, 454, 1023, 59),
]


def spread(number: int, layer: int) -> tuple[int, ...]:
    """Return `number` sites at even distances."""
    start = 53 * layer
    return tuple(sorted((start + i * SITES // number) % SITES for i in range(number)))


def structure() -> TransformerSpec:
    full = TransformerSpec.uniform(
        width=SITES, layers=12, heads=6, d_k=96, d_v=96, d_f=1536, length=512, inputs=256,
        outputs=256, positions=True,
    )  # fmt: skip
    operators: list[AttentionSpec | MlpSpec] = []
    attentions = (op for op in full.operators if isinstance(op, AttentionSpec))
    for layer, (initial, widths) in enumerate(zip(attentions, LAYERS, strict=True)):
        d_ai, pairs, d_v, d_ao, d_mi, d_f, d_mo = widths
        assert initial.frequencies is not None
        attention = dataclasses.replace(
            initial,
            reads=spread(d_ai, layer),
            writes=spread(d_ao, layer),
            keys=pairs,
            values=d_v,
            frequencies=initial.frequencies[:pairs],
        )
        operators += [attention, MlpSpec(layer, spread(d_mi, layer), spread(d_mo, layer), d_f)]
    return dataclasses.replace(full, operators=tuple(operators))


if __name__ == "__main__":
    path = Path(__file__).with_name("charlm-12l-paper.json")
    path.write_text(json.dumps(structure().to_dict()) + "\n")
    print(path)
