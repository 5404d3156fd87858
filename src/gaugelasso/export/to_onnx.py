"""ONNX files for onnxruntime and its relatives.

A model that generates becomes two files: `model.onnx` with keys and values of earlier tokens as
inputs and outputs, as Hugging Face's exporters write it, and `model_without_past.onnx`, which reads
whole sequences. Any other model becomes one `model.onnx`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gaugelasso.errors import UserError
from gaugelasso.export.comparison import Comparison, Say, Step, Whole
from gaugelasso.export.extras import quiet
from gaugelasso.export.source import Source
from gaugelasso.export.traced import Continuations, Prompts, Sequences, any_sizes, has_past
from gaugelasso.inference import InferenceModel

MODEL, WITHOUT_PAST = "model.onnx", "model_without_past.onnx"


def write_onnx(source: Source, folder: Path, dtype: torch.dtype, device: str, say: Say) -> float:
    """Write the files, run each in onnxruntime on the CPU, and return the largest deviation."""
    if dtype == torch.bfloat16:
        raise UserError(
            "form 'onnx' in bfloat16 cannot be compared, because onnxruntime has no such products "
            "on a CPU; give --dtype float16 or float32"
        )
    served = source.served(dtype)
    comparison = Comparison(source, dtype, say)
    if not has_past(served):
        say(f"tracing {MODEL}")
        session = _export(Sequences(served), folder / MODEL)
        return comparison.check(MODEL, whole=_sequences(session, served))
    say(f"tracing {MODEL}")
    session = _export(Continuations(served), folder / MODEL)
    step = _continuations(session, served)
    worst = comparison.check(MODEL, step=step)
    say(f"tracing {WITHOUT_PAST}")
    session = _export(Prompts(served), folder / WITHOUT_PAST)
    return max(worst, comparison.check(WITHOUT_PAST, whole=_prompts(session)))


def open_sequences(
    served: InferenceModel, path: Path, threads: Sequence[int]
) -> list[tuple[int, Whole]]:
    """Write a file that reads whole sequences, and return onnxruntime with it, by threads."""
    _write(Sequences(served), path)
    return [(count, _sequences(open_session(path, count), served)) for count in threads]


def open_steps(served: InferenceModel, path: Path, threads: int) -> Any:
    """Write a file that reads tokens after keys and values of earlier ones, and open it."""
    _write(Continuations(served), path)
    return open_session(path, threads)


def _export(module: Sequences, path: Path) -> Any:
    _write(module, path)
    return open_session(path)


def _write(module: Sequences, path: Path) -> None:
    with quiet(), any_sizes(), torch.no_grad():
        program = torch.onnx.export(
            module,
            module.example(),
            dynamo=True,
            # onnxruntime optimises when it loads a file. onnxscript's optimiser has changed
            # results: a ScatterND lost its reduction.
            optimize=False,
            verbose=False,
            dynamic_shapes=module.dims(),
            input_names=module.input_names(),
            output_names=module.output_names(),
        )
        assert program is not None
        program.save(str(path))


def open_session(path: Path, threads: int = 0) -> Any:
    """Open a file in onnxruntime on the CPU; 0 threads: as many as there are cores."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def _sequences(session: Any, served: InferenceModel) -> Whole:
    def whole(inputs: Tensor) -> Tensor:
        kind = served.dtype if inputs.is_floating_point() else inputs.dtype
        (name,) = (each.name for each in session.get_inputs())
        return _run(session, {name: inputs.to(kind)})[0]

    return whole


def _prompts(session: Any) -> Whole:
    def whole(tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1]).repeat(len(tokens), 1)
        mask = torch.ones_like(tokens)
        names = ("input_ids", "attention_mask", "position_ids")
        return _run(session, dict(zip(names, (tokens, mask, positions), strict=True)))[0]

    return whole


def _continuations(session: Any, served: InferenceModel) -> Step:
    names = [each.name for each in session.get_inputs()]

    def step(tokens: Tensor, mask: Tensor, positions: Tensor, past: Any) -> tuple[Tensor, Any]:
        if past is None:
            past = [each for pair in served.empty_past(len(tokens)) for each in pair]
        given = dict(zip(names, (tokens, mask, positions, *past), strict=True))
        logits, *present = _run(session, given)
        return logits, present

    return step


def _run(session: Any, given: dict[str, Tensor]) -> list[Tensor]:
    outputs = session.run(None, {name: tensor.numpy() for name, tensor in given.items()})
    return [torch.from_numpy(output) for output in outputs]
