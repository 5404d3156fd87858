"""Structures with their widths rounded up, for hardware that prefers multiples.

Changes a structure alone; copies no weights.
"""

import math
from dataclasses import replace

from gaugelasso.models.operator_spec import MlpSpec, OperatorSpec
from gaugelasso.models.spec import TransformerSpec


def round_up(spec: TransformerSpec, multiple: int) -> TransformerSpec:
    """The same network with every width increased to a multiple of `multiple` channels.

    The stream is rounded up too, and operators reach additional sites that they did not reach
    before. A RoPE pair counts as two channels; additional pairs repeat the last frequency.
    """

    def up(width: int, channels: int = 1) -> int:
        grain = multiple // math.gcd(multiple, channels)
        return -(-width // grain) * grain

    size = up(len(spec.sites))
    next_number = max(spec.sites) + 1

    def widen(reach: tuple[int, ...]) -> tuple[int, ...]:
        free = [site for site in range(size) if site not in set(reach)]
        return (*reach, *free[: up(len(reach)) - len(reach)])

    def widen_operator(operator: OperatorSpec) -> OperatorSpec:
        reads, writes = widen(operator.reads), widen(operator.writes)
        if isinstance(operator, MlpSpec):
            return replace(operator, reads=reads, writes=writes, filters=up(operator.filters))
        operator = replace(operator, reads=reads, writes=writes, values=up(operator.values))
        if operator.frequencies is None:
            return replace(operator, keys=up(operator.keys))
        keys, last = up(operator.keys, channels=2), operator.frequencies[-1]
        additional = (last,) * (keys - operator.keys)
        return replace(operator, keys=keys, frequencies=operator.frequencies + additional)

    return replace(
        spec,
        sites=(*spec.sites, *range(next_number, next_number + size - len(spec.sites))),
        embed=widen(spec.embed),
        classify=widen(spec.classify),
        operators=tuple(widen_operator(operator) for operator in spec.operators),
        head_hidden=up(spec.head_hidden),
    )
