"""Every form that tuning tries for the works of `benchmarks.serving`, with checked accesses.

    python -m tests.kernels.works division retrieval charlm --phases decode --batches 1 3

In Triton's interpreter, which it needs no GPU for, and with a few programs of every launch. Takes
half a minute for the phase of a small model, and ten for one of a large one.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from unittest.mock import patch

import torch
from benchmarks.serving import WORKS, models_of

import tests.kernels  # noqa: F401 (selects the interpreter)
from gaugelasso.inference import (
    Form,
    InferenceModel,
    folding,
    heads,
    operators,
    stream,
    tied,
    timed_parts,
)
from gaugelasso.inference.cache import Cache
from gaugelasso.inference.folding import StreamOrder
from gaugelasso.inference.tuning import ORDERS
from gaugelasso.inference.usable import Disagrees
from gaugelasso.models import Transformer
from tests.kernels.bounds import in_bounds

# As on a GPU.
ALIGN = 8


def run_every_form(
    model: Transformer, order: StreamOrder, phase: str, batch: int, length: int
) -> dict[str, int]:
    """The launches of each kernel; an error if one leaves its tensors."""

    def works(action: Callable[[], object], name: str = "") -> bool:
        try:
            action()
        except Disagrees:  # most programs were left out
            return False
        return True

    def last(_: str, actions: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
        return {name: -float(number) for number, name in enumerate(actions)}

    by_channel = partial(Cache, by_channel=True)
    with in_bounds(few=True) as launches, ExitStack() as patches:
        for module in (stream, operators, heads, folding, tied):
            patches.enter_context(patch.object(module, "uses_kernels", lambda tensor: True))
        changed = {"works": works, "times_on": last, "Cache": by_channel}
        patches.enter_context(patch.multiple(timed_parts, **changed))
        parts = timed_parts.Parts(
            model, torch.float32, False, batch, 1 if phase == "decode" else length, 1, order
        )
        parts.gpu = parts.kernels = True
        parts.plain = InferenceModel(model, forms=Form(), stream=order, align=ALIGN)
        forms = parts.choose()[0]
        served = InferenceModel(model, forms=forms, stream=order, align=ALIGN)
        if phase == "prefill":
            served(torch.randint(served.spec.inputs, (batch, length)))
        else:
            decode(served, batch)
    return launches


def decode(served: InferenceModel, batch: int) -> None:
    """Steps with an empty cache, a part of one, a full one, and one of unequal lengths."""
    length = served.spec.length
    widths = served.cache_widths()
    cache = Cache(widths, batch, length, served.dtype, served.device, by_channel=True)
    tokens = torch.randint(served.spec.inputs, (batch,))
    for held in (0, length // 2 - 1, length - 1):
        cache.hold_(held)
        served.decode(tokens, cache, static=True)
    cache.positions.copy_(torch.randint(length, (batch,)))
    cache.longest, cache.even = length - 1, False
    served.decode(tokens, cache, static=True)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("works", nargs="+", choices=list(WORKS))
    parser.add_argument("--models", nargs="+", default=["compressed", "uniform", "ancestor"])
    parser.add_argument("--phases", nargs="+", default=["prefill", "decode"])
    parser.add_argument("--batches", nargs="+", type=int, default=[3])
    parser.add_argument("--orders", nargs="+", default=list(ORDERS))
    parser.add_argument("--length", type=int, default=283, help="At most the model's length.")
    given = parser.parse_args(words)
    torch.manual_seed(0)
    for work in given.works:
        models = models_of(work)
        for name in given.models:
            model = models[name][0].eval()
            length = min(given.length, model.spec().length)
            for phase in given.phases:
                for batch in given.batches:
                    for order in given.orders:
                        start = time.monotonic()
                        with torch.inference_mode():
                            found = run_every_form(model, order, phase, batch, length)
                        seconds = time.monotonic() - start
                        what = f"{work} {name} {phase} {batch} {order}"
                        count = sum(found.values())
                        print(f"{what}: in bounds, {count} launches, {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
