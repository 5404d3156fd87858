"""Gauge exactness: side A times c and side B divided by c change no output."""

from collections.abc import Iterator

import torch
from torch import Tensor

from gaugelasso.axes import Axis, AxisTable, Compressible, Slot, Tensors, named_tensors, width
from gaugelasso.checking.result import Finding, failed, noted, passed
from gaugelasso.checking.subject import TOLERANCE, Subject, describe, difference, scale_

_POWERS = (0, 1, -1, 2, -2)


def check_gauge(subject: Subject) -> list[Finding]:
    """One finding for each axis that has indices."""
    model = subject.exact()
    probe = _Probe(subject, model)
    findings = []
    for axis in probe.table.axes:
        if not width(axis, probe.tensors):
            continue
        powers = _powers(axis)
        error = probe.error(axis, powers)
        if axis.gauge and error > TOLERANCE:
            findings.append(failed("gauge", axis.name, _diagnosis(probe, axis, powers, error)))
        elif axis.gauge:
            findings.append(
                passed("gauge", axis.name, f"exact to {TOLERANCE:g} under a rescale of each index")
            )
        elif error <= TOLERANCE and not {s.tensor for s in axis.side_a} & {
            s.tensor for s in axis.side_b
        }:
            findings.append(
                noted(
                    "gauge",
                    axis.name,
                    "is declared without gauge, but a rescale changes no output; leave out "
                    "gauge=False, so that a balance can weigh both sides",
                )
            )
    return findings


def _powers(axis: Axis) -> dict[Slot, int]:
    return {
        **dict.fromkeys(axis.side_a, 1),
        **dict.fromkeys(axis.side_b, -1),
        **{slot: slot.power for slot in axis.riders},
    }


class _Probe:
    """How much the output changes when slots are multiplied by powers of one factor."""

    def __init__(self, subject: Subject, model: Compressible):
        self._subject, self._model = subject, model
        self.table: AxisTable = model.axis_table()
        self.tensors: Tensors = named_tensors(model)
        self._before = subject.output(model)
        self._saved = {name: tensor.detach().clone() for name, tensor in self.tensors.items()}

    def error(self, axis: Axis, powers: dict[Slot, int]) -> float:
        generator = torch.Generator().manual_seed(1)
        size = width(axis, self.tensors)
        factor = 4 ** (torch.rand(size, generator=generator, dtype=torch.float64) - 0.5)
        for slot, power in powers.items():
            if power and self.tensors[slot.tensor].is_floating_point():
                scale_(slot, factor.to(self.tensors[slot.tensor].device), power, self.tensors)
        try:
            return difference(self._subject.output(self._model), self._before)
        finally:
            for name, tensor in self.tensors.items():
                tensor.detach().copy_(self._saved[name])


def _diagnosis(probe: _Probe, axis: Axis, powers: dict[Slot, int], error: float) -> str:
    """What to change: the one power, side or missing slot that makes the rescale exact, if any."""
    change = f"a rescale changes the output by {error:.1g} (relative)"
    for slot, declared in powers.items():
        for power in _POWERS:
            if power != declared and probe.error(axis, {**powers, slot: power}) <= TOLERANCE:
                return f"{change}; {_advice(axis, slot, power)}"
    for slot in _candidates(probe, axis):
        for power in _POWERS[1:]:
            if probe.error(axis, {**powers, slot: power}) <= TOLERANCE:
                return (
                    f"{change}; a rider is missing: {describe(slot)} must follow with power={power}"
                )
    return (
        f"{change}, and no change of one power or side makes it exact; is a GELU, SiLU, tanh or "
        "softmax between the sides? Then declare gauge=False, or make the tensor inside of the "
        "nonlinearity a rider"
    )


def _advice(axis: Axis, slot: Slot, power: int) -> str:
    name, sides = describe(slot), {1: "side_a", -1: "side_b"}
    if slot in axis.riders:
        return f"rider {name} has power={slot.power}, and power={power} is exact"
    here = "side_a" if slot in axis.side_a else "side_b"
    if power in sides:
        return f"{name} is on {here} and belongs on {sides[power]}"
    return f"{name} is on {here}, but is a rider with power={power}"


def _candidates(probe: _Probe, axis: Axis) -> Iterator[Slot]:
    """Dims of floating tensors that could be slots of the axis and are not."""
    own = {(slot.tensor, slot.dim) for slot in axis.slots()}
    size = width(axis, probe.tensors)
    links: dict[str, Tensor] = {
        str(slot.link): probe.tensors[str(slot.link)] for slot in axis.slots() if slot.link
    }
    for name, tensor in probe.tensors.items():
        if not tensor.is_floating_point():
            continue
        for dim in range(tensor.ndim):
            if (name, dim) in own:
                continue
            for link, positions in links.items():
                if len(positions) == tensor.shape[dim] and _same_part(name, link):
                    yield Slot(name, dim, link=link)
            if tensor.shape[dim] == size and not links:
                yield Slot(name, dim)


def _same_part(one: str, other: str) -> bool:
    """Whether two tensors belong to the same module."""
    return one.rpartition(".")[0] == other.rpartition(".")[0]
