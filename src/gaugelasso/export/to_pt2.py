"""PyTorch's own formats: a portable program, and packages compiled by AOTInductor.

`model.pt2` is loaded by `torch.export.load`, on any device that PyTorch has. `model.cpu.pt2` and
`model.cuda.pt2` hold machine code for the device that they were compiled on; they are loaded by
`torch._inductor.aoti_load_package`, or from C++. `cache.json` has the heads and widths of keys and
values of every layer of a model that generates. Such a model is one program, and whole sequences
have an empty past.
"""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim

from gaugelasso.errors import UserError, first_line
from gaugelasso.export.comparison import Comparison, Say
from gaugelasso.export.extras import quiet
from gaugelasso.export.source import Source
from gaugelasso.export.traced import (
    BATCH,
    LENGTH,
    PAST,
    TOTAL,
    Continuations,
    Sequences,
    any_sizes,
    has_past,
)
from gaugelasso.files.durable import write_new
from gaugelasso.inference import InferenceModel

MODEL, CACHE = "model.pt2", "cache.json"


def write_pt2(source: Source, folder: Path, dtype: torch.dtype, device: str, say: Say) -> float:
    """Write the files, load each again, and return the largest deviation.

    With device "auto" a package for the CPU is written, and one for a GPU where there is one.
    """
    check_compiler()
    comparison = Comparison(source, dtype, say)
    devices = ["cpu"] if not torch.cuda.is_available() else ["cpu", "cuda"]
    devices = devices if device == "auto" else [device]
    say(f"tracing {MODEL}")
    with quiet():
        program = _traced(source.served(dtype))
        torch.export.save(program, folder / MODEL)
        loaded = torch.export.load(folder / MODEL).module()
    if has_past(source.served()):
        pairs = source.served().empty_past(1)
        widths = [(k.shape[1], k.shape[3], v.shape[3]) for k, v in pairs]
        write_new(folder / CACHE, [json.dumps(widths).encode()])
    found = [_check(comparison, MODEL, loaded, source.served(dtype))]
    for where in devices:
        served = source.served(dtype, where)
        name = f"model.{torch.device(where).type}.pt2"
        if torch.device(where).type != "cpu":
            say(f"tracing {name}")
            with quiet():
                program = _traced(served)
        say(f"compiling {name}, which takes half a minute or more")
        found.append(_check(comparison, name, _compiled(program, folder / name), served))
    return max(found)


def check_compiler() -> None:
    """UserError if the C++ compiler that AOTInductor calls is not installed."""
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        raise UserError(
            f"form 'pt2' needs the C++ compiler {compiler!r}, which is not installed; install it, "
            "or name another in the environment variable CXX"
        )


def _traced(served: InferenceModel) -> Any:
    module = Continuations(served) if has_past(served) else Sequences(served)
    length = served.spec.length
    named = {
        BATCH: Dim(BATCH, min=1),
        LENGTH: Dim(LENGTH, min=1, max=length),
        PAST: Dim(PAST, min=0, max=length),
        TOTAL: Dim.DYNAMIC,  # past and length together
    }

    def sizes(given: Any) -> Any:
        if isinstance(given, dict):
            return {dim: named[name] for dim, name in given.items()}
        return type(given)(map(sizes, given))

    with any_sizes(), torch.no_grad():
        return torch.export.export(module, module.example(), dynamic_shapes=sizes(module.dims()))


def _compiled(program: Any, path: Path) -> Callable[..., Any]:
    from torch._inductor import aoti_compile_and_package, aoti_load_package
    from torch._inductor.exc import CppCompileError

    try:
        with quiet():
            aoti_compile_and_package(program, package_path=str(path))
    except CppCompileError as error:
        raise UserError(
            f"form 'pt2': the C++ compiler failed ({first_line(error)}); it needs the headers of "
            "Python and an OpenMP library"
        ) from error
    return aoti_load_package(str(path))


def _check(
    comparison: Comparison, name: str, call: Callable[..., Any], served: InferenceModel
) -> float:
    where = served.device
    if not has_past(served):

        def whole(inputs: Tensor) -> Tensor:
            kind = served.dtype if inputs.is_floating_point() else inputs.dtype
            return call(inputs.to(where, kind))

        return comparison.check(name, whole=whole)

    def step(tokens: Tensor, mask: Tensor, positions: Tensor, past: Any) -> tuple[Tensor, Any]:
        past = served.empty_past(len(tokens)) if past is None else past
        return call(tokens.to(where), mask.to(where), positions.to(where), past)

    return comparison.check(name, step=step)
