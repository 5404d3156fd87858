"""The parts of an axis table: slots, axes, cost terms, normalisers.

Declarations only. Knows nothing of tensors' values.
"""

import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from torch import Tensor

from gaugelasso.errors import UserError

Tensors = Mapping[str, Tensor]
Side = Literal["a", "b"]
CostKind = Literal["matmul", "lookup", "scale", "rotation", "scores", "mix", "cache"]
# What lies between the sides of an axis, and so how new indices can be added to it.
Growth = Literal["linear", "rotation", "permutation"]


class AxisError(UserError):
    """A model's axis table contradicts its tensors."""


def check_tuple(name: str, value: Any, kind: type) -> None:
    """AxisError unless the value is a tuple of this kind; a missing comma makes it a single one."""
    if not isinstance(value, tuple):
        raise AxisError(f"{name} = {value!r} is not a tuple of {kind.__name__}: write (x,)")
    for entry in value:
        if not isinstance(entry, kind):
            raise AxisError(f"{name} contains {entry!r}, which is not a {kind.__name__}")


@dataclass(frozen=True)
class Slot:
    """One tensor's dim on an axis.

    `link` names an integer buffer that maps positions along `dim` to indices of the axis.
    Without a link, position and index are the same. `power` says how a rider follows a balance
    by c: it is multiplied by c**power. Side A is multiplied by c, side B by 1/c.

    `stage` orders the writers (side A) and readers (side B) of a linked axis in time. A write
    after the last read is dead, and so is a read before the first write. An index whose slots
    have stages may be split in time. Without stages, every writer comes before every reader.

        Slot("attention_0.query", 0)                        # rows of W_q
        Slot("attention_0.read.gain", 0, link="attention_0.read.sites")
    """

    tensor: str
    dim: int = 0
    link: str | None = None
    power: int = 0
    stage: int | None = None


@dataclass(frozen=True)
class Axis:
    """A removable set of indices: two penalised gauge sides, and riders that are removed with them.

    `gauge` says whether side A may be multiplied by c and side B divided by it without a change of
    the output. With `gauge=False` (a GELU between the sides, or a tensor that is on both) no
    balance changes the axis. Its penalty, price and drops are the usual ones.

    `silences` says whether the owner writes nothing once the axis is empty. Attention without
    keys still writes the mean of its values. Its key axis therefore has `silences=False`, and
    its last index stays as long as the operator does.

    `growth` says which changes of basis the axis admits, and so how it may grow (the paper's table
    regrowth_class): `linear`, any orthogonal map on both sides, if nothing is between them;
    `rotation`, a rotation of each pair (keys with RoPE); `permutation`, a reordering alone (an
    activation or a normaliser). None, the default: the axis never grows.
    """

    name: str
    kind: str
    side_a: tuple[Slot, ...]
    side_b: tuple[Slot, ...]
    riders: tuple[Slot, ...] = ()
    owner: str | None = None
    silences: bool = True
    gauge: bool = True
    growth: Growth | None = None

    def __post_init__(self) -> None:
        for part in ("side_a", "side_b", "riders"):
            check_tuple(f"axis {self.name!r}: {part}", getattr(self, part), Slot)
        self._check_growth()
        moving = [slot.tensor for slot in self.riders if slot.power]
        if not self.gauge and moving:
            raise AxisError(
                f"axis {self.name!r} has gauge=False, so that nothing rescales its rider "
                f"{moving[0]!r}: leave out its power, or put it on a side"
            )

    def _check_growth(self) -> None:
        known = typing.get_args(Growth)
        if self.growth is not None and self.growth not in known:
            raise AxisError(
                f"axis {self.name!r}: growth = {self.growth!r} is unknown; use one of "
                f"{', '.join(known)}, or None for an axis that does not grow"
            )
        if self.growth == "linear":
            bent = [slot.tensor for slot in self.slots() if slot.link is not None]
            bent += [slot.tensor for slot in self.riders]
            if bent or not self.gauge:
                reason = f"{bent[0]!r} has a link or is a rider" if bent else "it has gauge=False"
                raise AxisError(
                    f"axis {self.name!r} has growth='linear', but {reason}, so that no orthogonal "
                    "map can mix its indices: use growth='permutation'"
                )
        on_a = {(slot.tensor, slot.dim) for slot in self.side_a}
        tied = [slot.tensor for slot in self.side_b if (slot.tensor, slot.dim) in on_a]
        if self.growth and tied:
            raise AxisError(
                f"axis {self.name!r}: {tied[0]!r} is on both sides, so that no index can be added "
                "without an effect: leave out growth"
            )

    def sides(self) -> Iterator[tuple[Side, tuple[Slot, ...]]]:
        yield "a", self.side_a
        yield "b", self.side_b

    def slots(self) -> tuple[Slot, ...]:
        return self.side_a + self.side_b + self.riders

    def direct(self) -> tuple[Slot, ...]:
        """The slots without a link: their positions are the indices of the axis."""
        return self._direct

    def linked(self) -> tuple[Slot, ...]:
        """The penalised slots that reach the axis through a position map."""
        return self._linked

    # Cached: one event reads these thousands of times.
    @cached_property
    def _direct(self) -> tuple[Slot, ...]:
        return tuple(slot for slot in self.slots() if slot.link is None)

    @cached_property
    def _linked(self) -> tuple[Slot, ...]:
        return tuple(slot for slot in self.side_a + self.side_b if slot.link is not None)


@dataclass(frozen=True)
class Cost:
    """One term of the work per token: `factor` times the product of the axes' widths.

    An accounting weights the term by its `kind`. `unit` is the number of channels in one index
    (2 for a RoPE pair). The kind `cache` is no work: it is the numbers that are kept of a token.
    `window` is for scores and mixes of a causal attention whose queries see that many keys at most.
    """

    kind: CostKind
    factor: int
    axes: tuple[str, ...]
    unit: int = 1
    window: int | None = None

    def __post_init__(self) -> None:
        known = typing.get_args(CostKind)
        if self.kind not in known:
            raise AxisError(f"cost kind {self.kind!r} is unknown; use one of {', '.join(known)}")
        check_tuple(f"cost {self.kind!r}: axes", self.axes, str)

    def visible_keys(self, length: int, visible: float) -> float:
        """The mean number of keys that a query sees, given the context of the table.

        With a window w of a length l it is the mean of min(t, w) over the positions t = 1..l.
        """
        window = self.window
        if window is None or window >= length:
            return visible
        return window - window * (window - 1) / (2 * length)


@dataclass(frozen=True)
class Size:
    """A size that a time depends on: a constant, and widths times whole numbers, added up.

    Size((("mlp_0.d_f", 1),))                       # the filters
    Size((("attention_0.d_v", 4),))                 # four heads of values, side by side
    """

    widths: tuple[tuple[str, int], ...] = ()
    constant: int = 0


@dataclass(frozen=True)
class Operation:
    """One operation of the served model. A profile says how long it takes at which sizes.

    `fixed` are the numbers that no cut changes, such as those of heads; a profile measures an
    operation for each of their values that occurs. Only the accounting `latency` reads operations.
    """

    kind: str
    sizes: tuple[Size, ...]
    fixed: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_tuple(f"operation {self.kind!r}: sizes", self.sizes, Size)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that its sizes depend on, each once."""
        return tuple(dict.fromkeys(name for size in self.sizes for name, _ in size.widths))


@dataclass(frozen=True)
class Norm:
    """The tensors of one slow normaliser: learned gain, slow weights, last input energy.

    The energy of an input is its mean square over the tokens. With `by_token` it is the mean square
    of the normalised input, so that tokens of any magnitude count alike. A model with such a
    normaliser is taken to be pretrained: its slow weights follow only while there is pressure.
    """

    gain: str
    weight: str
    energy: str
    # Whether a constant is added under its root. Then gain and weights cannot be scaled against
    # each other without a change of outputs.
    has_eps: bool = False
    by_token: bool = False
    # Whether the slow weights follow the gain, for channels that leave the normaliser while they
    # are still written. A normaliser in place has no such channels, and its weights stay.
    follows: bool = True
