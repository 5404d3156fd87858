"""Where the time of a served model goes: by kernel, by operator, and against the roofline.

    python -m benchmarks.serving_profile --works charlm --out profile.json
    python -m benchmarks.serving_profile --works demo --device cpu --models compressed
    python -m benchmarks.serving_profile --works charlm --cases prefill:96 --models compressed

For each model and case: the whole pass as it is served (on a GPU as a CUDA graph), the time and the
launches of each kernel as `torch.profiler` sees them, each part of each operator timed alone, with
its widths, and what tuning measured of the forms that it did not take. The bound of a part is the
longer one of its arithmetic at `--teraflops` and of its necessary memory traffic at `--terabytes`
per second; widths count without padding.
"""

import argparse
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from benchmarks.engines import gaugelasso_model
from benchmarks.serving import WORKS, models_of
from benchmarks.serving_case import Case, at_most
from torch import Tensor

from gaugelasso.bench.stopwatch import in_turns
from gaugelasso.inference import InferenceModel
from gaugelasso.inference.clocks import times_on
from gaugelasso.inference.operators import Attention, Classifier, Mlp
from gaugelasso.runs.environment import environment
from gaugelasso.runs.writing import make_folder, write_json

Row = dict[str, Any]
MODELS = ("ancestor", "uniform", "compressed")


class Part(NamedTuple):
    """One part of an operator: what it does, its work, and an action that does it."""

    operator: str
    kind: str
    widths: str
    flops: float
    bytes: float
    action: Callable[[], object]


def parts(served: InferenceModel, case: Case) -> Iterator[Part]:
    """The parts of every operator, on random activations of the case's sizes."""
    decoding = case.phase == "decode"
    tokens = case.batch * (1 if decoding else case.length)
    size, spec = served.dtype.itemsize, served.spec
    inputs = case.inputs(spec.inputs)[:, :1] if decoding else case.inputs(spec.inputs)
    x = _stream(served, tokens)
    at = torch.full((case.batch, 1), case.length - 1, device=served.device) if decoding else None
    yield Part("embedding", "embed", f"{spec.inputs} -> {served.width}", 0.0,
               size * tokens * served.width, partial(served.embedding, inputs, at))  # fmt: skip
    # The spec's operators are in the order of the model's.
    widths = {name: (len(op.reads), len(op.writes)) for name, op in _named(served)}
    for name, part in served.readers().items():
        if isinstance(part, Classifier):
            reads, columns = len(spec.classify), part.outputs
            yield _product(name, "read", tokens, reads, columns, columns, 0, size,
                           partial(part, x))  # fmt: skip
            continue
        reads, writes = widths[name]
        at_once = part.form.step == "whole" if decoding else _joined(part, x)
        if at_once:
            yield _whole(served, case, name, part, x, reads, writes)
            continue
        if isinstance(part, Mlp):
            filters = _filters(served, name)
            yield _product(name, "read+swiglu", tokens, reads, 2 * filters, filters, 0, size,
                           partial(part.read, x, True))  # fmt: skip
            inner = filters
        else:
            inner = part.heads * part.d_v
            yield from _attention_parts(served, case, name, part, x, reads)
        h = _random(served, tokens, part.write.maps.values.shape[0])
        yield _product(name, "write", tokens, inner, writes, writes, writes, size,
                       partial(part.write, x, h))  # fmt: skip


def _whole(
    served: InferenceModel, case: Case, name: str, part: Attention | Mlp, x: Tensor,
    reads: int, writes: int,
) -> Part:  # fmt: skip
    """An operator of a decoding step in one kernel, or an MLP of many tokens."""
    size = served.dtype.itemsize
    if isinstance(part, Mlp):
        inner = _filters(served, name)
        first = [_product(name, "", len(x), reads, 2 * inner, 0, 0, size, partial(part, x))]
    else:
        inner = part.heads * part.d_v
        first = list(_attention_parts(served, case, name, part, x, reads))
    every = [*first, _product(name, "", len(x), inner, writes, 0, writes, size, first[-1].action)]
    widths = "; ".join(each.widths for each in every)
    flops = sum(each.flops for each in every)
    # What is written is computed on the chip, and not read from memory.
    moved = sum(each.bytes for each in every) - size * len(x) * inner
    kind = "step" if case.phase == "decode" else "joined"
    return Part(name, kind, widths, flops, moved, first[-1].action)


def _joined(part: Attention | Mlp, x: Tensor) -> bool:
    """Whether this is an MLP that one kernel computes."""
    joined = isinstance(part, Mlp) and part.form.joined is not None and part.joins(x)
    return joined and part.form.write == "fused"


def _attention_parts(
    served: InferenceModel, case: Case, name: str, part: Attention, x: Tensor, reads: int
) -> Iterator[Part]:
    batch, length, size = case.batch, case.length, served.dtype.itemsize
    columns = part.heads * part.d_k + part.groups * (part.d_k + part.d_v)
    yield _product(name, "read", len(x), reads, columns, columns, 0, size, partial(part.read, x))
    what = f"{part.heads}/{part.groups} heads of {part.d_k}/{part.d_v}"
    if case.phase == "prefill":
        seen = length * (length + 1) / 2 if served.spec.causal else length * length
        moved = len(x) * (columns + part.heads * part.d_v)
        rows = part.read(x)
        action = partial(part.mix, rows, batch, causal=served.spec.causal)
    else:
        seen = length
        moved = batch * length * part.groups * (part.d_k + part.d_v)
        cache = served.new_cache(batch, length)
        cache.hold_(length - 1)
        index = list(served.attentions()).index(name)
        state = (cache.rows(index), cache.new_tokens(static=served.device.type == "cuda"))
        if part.form.step == "whole":
            action = partial(part.step, x, *state)
        else:
            action = partial(part.mix_one, part.read(x), *state)
    flops = 2 * batch * part.heads * seen * (part.d_k + part.d_v)
    yield Part(name, "attention", what, flops, size * moved, action)


def _product(operator: str, kind: str, tokens: int, inner: int, columns: int, out: int,
             read_back: int, size: int, action: Callable[[], object]) -> Part:  # fmt: skip
    """A product of `inner` by `columns`, of which `out` are stored and `read_back` read before."""
    moved = tokens * (inner + out + read_back) + inner * columns
    flops = 2.0 * tokens * inner * columns
    return Part(operator, kind, f"{inner} -> {columns}", flops, size * moved, action)


def _named(served: InferenceModel) -> Iterator[tuple[str, Any]]:
    return zip(served.operators, served.spec.operators, strict=True)


def _filters(served: InferenceModel, name: str) -> int:
    return int(dict(_named(served))[name].filters)


def _stream(served: InferenceModel, tokens: int) -> Tensor:
    if served.embedding.order == "tokens":
        return _random(served, tokens, served.width)
    return _random(served, served.width, tokens).T


def _random(served: InferenceModel, *shape: int) -> Tensor:
    return torch.randn(shape, device=served.device).to(served.dtype)


def operator_rows(
    served: InferenceModel, case: Case, repeats: int, flops_s: float, bytes_s: float
) -> list[Row]:
    """A row for each part: milliseconds, work, rates, and the share of the roofline."""
    rows = []
    kind = served.device.type
    for part in parts(served, case):
        [seconds] = times_on(kind, {part.kind: part.action}, repeats).values()
        bound = max(part.flops / flops_s, part.bytes / bytes_s)
        form = served.forms.get(part.operator)
        rows.append({
            "operator": part.operator, "part": part.kind, "widths": part.widths,
            "form": str(form) if form else None, "ms": 1000 * seconds, "bound_ms": 1000 * bound,
            "of_bound": bound / seconds, "teraflops": part.flops / seconds / 1e12,
            "terabytes_per_s": part.bytes / seconds / 1e12,
        })  # fmt: skip
    return rows


def kernel_rows(action: Callable[[], object], device: str, calls: int) -> list[Row]:
    """Time and launches of each kernel (on a CPU: of each operation) in one pass."""
    cuda = device.startswith("cuda")
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CUDA if cuda else kinds.CPU]) as profile:
        action()
        if cuda:
            torch.cuda.synchronize()
    spent: dict[str, list[float]] = defaultdict(list)
    for event in profile.events() or ():
        if cuda:
            if event.device_type == torch.autograd.DeviceType.CUDA:
                spent[event.name].append(event.device_time_total)
        elif event.self_cpu_time_total:
            spent[event.name].append(event.self_cpu_time_total)
    total = sum(map(sum, spent.values()))
    rows = [
        {"kernel": name, "ms": sum(times) / 1000 / calls, "launches": len(times) / calls,
         "share": sum(times) / total}
        for name, times in spent.items()
    ]  # fmt: skip
    return sorted(rows, key=lambda row: -row["ms"])


@torch.inference_mode()
def profiled(
    model: str, network: Any, case: Case, repeats: int, flops_s: float, bytes_s: float
) -> Row:
    """All that is measured of one model in one case."""
    served, action = gaugelasso_model(network, case)
    [times] = in_turns({model: action}, case.device, repeats).values()
    kernels = kernel_rows(action, case.device, case.calls)
    forms = {name: str(form) for name, form in served.forms.items()}
    alternatives = {
        name: {kind: {str(form): 1000 * each for form, each in times.items()}
               for kind, times in timings.items()}
        for name, timings in served.timings.items()
    }  # fmt: skip
    return {
        "model": model, "phase": case.phase, "batch": case.batch, "length": case.length,
        "ms": statistics.median(times) / case.calls, "stream": served.embedding.order,
        "forms": forms, "kernels": kernels,
        "operators": operator_rows(served, case, repeats, flops_s, bytes_s),
        "alternatives_ms": alternatives,
    }  # fmt: skip


def show(found: Row, most: int = 25) -> None:
    """One model and case as tables."""
    print(f"\n== {found['model']} {found['phase']} {found['batch']}x{found['length']}: "
          f"{found['ms']:.4f} ms, stream by {found['stream']}")  # fmt: skip
    launches = sum(row["launches"] for row in found["kernels"])
    busy = sum(row["ms"] for row in found["kernels"])
    print(f"-- kernels: {launches:.0f} launches, {busy:.4f} ms")
    for row in found["kernels"][:most]:
        print(f"{row['ms']:9.4f} ms {100 * row['share']:5.1f}% {row['launches']:6.1f}x "
              f"{row['kernel'][:90]}")  # fmt: skip
    print("-- parts timed alone: ms, bound, share of it, TFLOP/s, TB/s, form and other forms in ms")
    for row in found["operators"]:
        kind = row["part"].partition("+")[0]
        others = found["alternatives_ms"].get(row["operator"], {}).get(kind, {})
        fastest = sorted(others.items(), key=lambda each: each[1])[:6]
        print(f"{row['operator']:13} {row['part']:12} {row['widths']:22} {row['ms']:8.4f} "
              f"{row['bound_ms']:8.4f} {100 * row['of_bound']:5.1f}% {row['teraflops']:6.1f} "
              f"{row['terabytes_per_s']:6.2f}  "
              + " ".join(f"{name}={ms:.4f}" for name, ms in fastest))  # fmt: skip
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for row in found["operators"]:
        kind = f"{row['operator'].partition('_')[0]} {row['part']}"
        sums[kind][0] += row["ms"]
        sums[kind][1] += row["bound_ms"]
    print("-- sums of the parts: ms, bound")
    for kind, (ms, bound) in sums.items():
        print(f"{kind:26} {ms:9.4f} {bound:9.4f}")
    every = [sum(column) for column in zip(*sums.values(), strict=True)]
    print(f"{'all':26} {every[0]:9.4f} {every[1]:9.4f}")


def a_case(word: str, length: int, device: str) -> Case:
    """PHASE:BATCH."""
    phase, _, batch = word.partition(":")
    if phase not in ("prefill", "decode") or not batch.isdigit() or not int(batch):
        raise argparse.ArgumentTypeError(f"{word!r}: give prefill:BATCH or decode:BATCH")
    return Case(phase, int(batch), length, device)  # type: ignore[arg-type]


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--works", nargs="+", choices=list(WORKS), default=["charlm"])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument(
        "--cases", nargs="+", default=["prefill:96", "decode:256", "decode:1"],
        metavar="PHASE:BATCH", help="For example prefill:96 or decode:1.",
    )  # fmt: skip
    parser.add_argument("--length", type=int, default=512, help="At most the model's length.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--teraflops", type=float, default=989.0, help="Of the device, dense.")
    parser.add_argument("--terabytes", type=float, default=4.8, help="Per second, of its memory.")
    parser.add_argument("--out", type=Path, help="A JSON file for all of it.")
    given = parser.parse_args(words)
    try:
        cases = [a_case(word, given.length, given.device) for word in given.cases]
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    rates = 1e12 * given.teraflops, 1e12 * given.terabytes
    rows = []
    for work in given.works:
        networks = models_of(work)
        for case in cases:
            for model in given.models:
                network = networks[model][0]
                fitting = at_most(case, network.spec().length)
                found = profiled(model, network, fitting, given.repeats, *rates)
                rows.append({"work": work, **found})
                show(rows[-1])
                if given.out:  # after each: a long command may be interrupted
                    make_folder(given.out.parent)
                    about = environment(given.device)
                    write_json(given.out, {**about, "rows": rows})
                if given.device.startswith("cuda"):
                    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
