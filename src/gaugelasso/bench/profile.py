"""Measures the time of every operation of a served model over a grid of widths: `profile`.

On a GPU the times are those of CUDA graphs by the device's own clock, without launches, as a
captured model is served. Of the forms of an operation the fastest counts, as `tuned` chooses it.
"""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import numpy as np
import torch
from torch import Tensor

from gaugelasso.axes import named_tensors
from gaugelasso.bench.operations import Action, Actions, Setting, actions, unit
from gaugelasso.compress.latency import Latency, at_widths, check_operations
from gaugelasso.compress.pricing import total_fma
from gaugelasso.compress.time_table import Circumstances, TimeTable, Timing
from gaugelasso.inference import InferenceModel, tuned
from gaugelasso.inference.clocks import call_times, graph_times
from gaugelasso.inference.folded import GPU_ALIGN
from gaugelasso.inference.products import without_onednn
from gaugelasso.inference.usable import works
from gaugelasso.models import Transformer
from gaugelasso.runs.environment import environment

# Points of a grid as shares of the largest size: from one to the next a time changes by more than
# the noise of its measurement.
_SHARES = (1.0, 0.75, 0.5, 0.375, 0.25, 0.125, 0.0625, 0.0)
# Plateaus are looked for at these multiples of the padding, over two of the longest ones.
_PLATEAUS = (2, 4, 8)
_CPU_PLATEAUS = (4, 8, 16)
# A plateau counts if steps leave at most this share of the deviation from a straight line.
_EXPLAINED = 0.25
# On a CPU an action is repeated for so many seconds, within these numbers.
_SECONDS, _FEWEST, _MOST = 0.02, 3, 30
_GRAPHS = 10

Progress = Callable[[int, int], None]


class Profile:
    """Measures one model: `inputs` [B, S] are what a pass reads, on the model's device.

    With `decode`, the time is that of one more token after a cache of S positions.
    """

    def __init__(
        self, model: Transformer, inputs: Tensor, dtype: torch.dtype, *, decode: bool = False
    ):
        batch, length = inputs.shape[:2]
        self.model, self.inputs, self.decode = model, inputs[:, :1] if decode else inputs, decode
        self.device = inputs.device
        if decode:
            InferenceModel(model).check_generates()
        # The switches of the whole model; forms are chosen for each operation below.
        self.served = tuned(model, self.inputs, dtype=dtype)
        if decode:
            self.served.step_by_numpy_(False)  # the table has the operations of PyTorch
        part = self.served.tokens_per_pass
        together = batch if part is None or decode else max(1, part // length)
        self.passes = math.ceil(batch / together)
        self.batch, self.length = batch, length
        self.setting = Setting(
            spec=model.spec(),
            device=self.device,
            dtype=dtype,
            batch=together,
            length=length,
            decode=decode,
            align=GPU_ALIGN if self.device.type == "cuda" else 1,
            order=self.served.embedding.order,
        )

    @torch.inference_mode()
    def measure(self, on_progress: Progress = lambda done, of: None) -> TimeTable:
        """The whole table."""
        table = self.model.axis_table()
        widths = table.widths(named_tensors(self.model))
        largest: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        for operation in check_operations(table):
            sizes = [int(at_widths(size, widths)) for size in operation.sizes]
            before = largest.get((operation.kind, operation.fixed), sizes)
            largest[operation.kind, operation.fixed] = list(map(max, before, sizes))
        timings = []
        for number, ((kind, fixed), most) in enumerate(largest.items()):
            on_progress(number, len(largest))
            timings.append(self._operation(kind, fixed, tuple(most)))
        on_progress(len(largest), len(largest))
        return TimeTable(self._circumstances(), tuple(timings))

    def _operation(self, kind: str, fixed: tuple[int, ...], most: tuple[int, ...]) -> Timing:
        base = unit(self.setting, kind)
        step = 2 if kind == "attention" and fixed[2] else 1  # RoPE rotates pairs
        timed = partial(self._milliseconds, kind, fixed)
        multiples = tuple(
            self._multiple(timed, most, side, math.lcm(base, step if side == 0 else 1))
            for side in range(len(most))
        )
        units = [math.lcm(each, step if side == 0 else 1) for side, each in enumerate(multiples)]
        grids = tuple(grid(size, each) for size, each in zip(most, units, strict=True))
        ms = np.empty(tuple(map(len, grids)))
        for place in np.ndindex(*ms.shape):
            sizes = tuple(points[i] for points, i in zip(grids, place, strict=True))
            ms[place] = timed(self._real(kind, sizes))
        return Timing(kind, fixed, multiples, grids, ms)

    def _multiple(
        self, timed: Callable[[tuple[int, ...]], float], most: tuple[int, ...], side: int, base: int
    ) -> int:
        """The multiple that one size is best of: its padding, or a longer plateau that is found."""
        lengths = [base * each for each in (_CPU_PLATEAUS if base < 4 else _PLATEAUS)]
        lengths = [each for each in lengths if 3 * each <= most[side]]
        if not lengths:
            return base
        points = range(most[side] - 2 * lengths[-1], most[side] + 1, base)
        points = range(max(base, points.start // base * base), most[side] + 1, base)
        line = [timed((*most[:side], point, *most[side + 1 :])) for point in points]
        return plateau(points, line, base, lengths)

    def _real(self, kind: str, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Sizes of a grid that the stream has: multiples may be above its width."""
        width = self.setting.padded(len(self.setting.spec.sites))
        if kind in ("read", "gated read"):
            return (min(sizes[0], width), sizes[1])
        return (sizes[0], min(sizes[1], width)) if kind == "write" else sizes

    def _milliseconds(self, kind: str, fixed: tuple[int, ...], sizes: tuple[int, ...]) -> float:
        with self._products():
            seconds = self._fastest(actions(self.setting, kind, fixed, sizes))
        return 1000 * seconds * self.passes

    def _fastest(self, forms: Actions) -> float:
        if self.device.type == "cuda":
            fastest = min(graph_times(_working(forms), _GRAPHS).values())
            _release_graphs(self.device)
            return fastest
        first = next(iter(forms.values()))
        first()
        began = time.perf_counter()
        first()
        spent = time.perf_counter() - began
        return min(call_times(forms, round(min(max(_SECONDS / spent, _FEWEST), _MOST))).values())

    def _products(self) -> AbstractContextManager[None]:
        return nullcontext() if self.served.onednn else without_onednn()

    @torch.inference_mode()
    def whole(self) -> float:
        """Milliseconds of the whole model as it is served, to compare the sum of the table with."""
        action: Action = partial(self.served, self.inputs)
        if self.decode:
            cache = self.served.new_cache(self.batch, self.length)

            def action() -> Tensor:
                cache.hold_(self.length - 1)
                return self.served.decode(self.inputs[:, 0], cache, static=self.inputs.is_cuda)

        return 1000 * self._fastest({"": action})

    def _circumstances(self) -> Circumstances:
        found = environment(str(self.device))
        return Circumstances(
            device=self.device.type,
            dtype=str(self.setting.dtype).removeprefix("torch."),
            mode="decode" if self.decode else "forward",
            batch=self.batch,
            length=self.length,
            **{key: found[key] for key in ("hardware", "torch", "date", "threads")},
        )


def _working(forms: Actions) -> Actions:
    """The forms that this device can compute; a tile may need more memory than it has."""
    return {name: action for name, action in forms.items() if works(action, str(name))}


def _release_graphs(device: torch.device) -> None:
    """Release the memory of graphs that are gone, once it is half of all. It takes long."""
    if 2 * torch.cuda.memory_reserved(device) > torch.cuda.mem_get_info(device)[1]:
        torch.cuda.empty_cache()


def estimate(model: Transformer, table: TimeTable) -> float:
    """Milliseconds of a model by the table: the sum of its operations."""
    return total_fma(model.axis_table(), Latency(table), named_tensors(model))


def grid(largest: int, multiple: int) -> tuple[int, ...]:
    """Sizes to measure: multiples, from the smallest to the first that is not below the largest."""
    points = {max(multiple, math.ceil(largest * each / multiple) * multiple) for each in _SHARES}
    return tuple(sorted(points))


def plateau(
    points: Sequence[int], times: Sequence[float], base: int, lengths: Sequence[int]
) -> int:
    """The length of the steps in which a time grows; `base` if it grows evenly.

    Least squares of a straight line in the size, rounded up to each length.
    """
    left = {length: _deviation(points, times, length) for length in (base, *lengths)}
    best = min(left, key=lambda length: left[length])
    return best if left[best] <= _EXPLAINED * left[base] else base


def _deviation(points: Sequence[int], times: Sequence[float], length: int) -> float:
    rounded = np.ceil(np.asarray(points) / length) * length
    columns = np.stack([np.ones(len(rounded)), rounded], 1)
    fit = np.linalg.lstsq(columns, np.asarray(times), rcond=None)[0]
    return float(np.square(columns @ fit - times).sum())
