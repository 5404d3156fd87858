"""Two engines of `serving.py` that run exports of any structure: onnxruntime and transformers."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.serving_case import Action, Case, Impossible
from torch import Tensor, nn

from gaugelasso.errors import UserError
from gaugelasso.export.source import TRACED, Source
from gaugelasso.export.to_hf import check_causal_lm, hf_model
from gaugelasso.export.to_onnx import MODEL, open_steps
from gaugelasso.export.traced import has_past
from gaugelasso.inference import Form, InferenceModel
from gaugelasso.models import Transformer

# Of the spread of the logits: an export that is further away computes something else.
_FAR = 1e-3


def onnxruntime(model: Transformer, case: Case) -> tuple[Action, dict[str, Any]]:
    """Our inference form as ONNX, on a CPU."""
    if case.device != "cpu":
        raise Impossible("only a CPU is measured here")
    try:
        import onnxruntime as runtime
    except ImportError as error:
        raise Impossible(f"onnxruntime is not installed ({error})") from None
    if case.phase == "decode":
        return _onnx_steps(model, case)
    served = InferenceModel(model.cpu().eval(), forms=Form(write="spread"))
    inputs = case.inputs(served.spec.inputs)
    exported = _LastLogits(served).eval() if case.last else served
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        path = Path(folder) / "model.onnx"
        # Its optimiser breaks some models.
        torch.onnx.export(exported, (inputs,), path, dynamo=True, optimize=False, verbose=False)
        options = runtime.SessionOptions()
        options.intra_op_num_threads = case.threads or 0
        session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    given = {session.get_inputs()[0].name: inputs.numpy()}
    with torch.inference_mode():
        wanted = exported(inputs)
    _check(torch.from_numpy(session.run(None, given)[0]), wanted)

    def prefill() -> Any:
        return session.run(None, given)

    return prefill, {"weight_bytes": served.weight_bytes}


class _LastLogits(nn.Module):
    """A model that gives the logits of the last position."""

    def __init__(self, served: InferenceModel):
        super().__init__()
        self.served = served

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.served(inputs, last=True)
        return logits


def _check(logits: Tensor, wanted: Tensor) -> None:
    largest = (logits.float() - wanted).abs().max()
    if not largest < _FAR * wanted.std():
        raise Impossible(f"the export is wrong: logits are off by {float(largest):.2g}")


def _onnx_steps(model: Transformer, case: Case) -> tuple[Action, dict[str, Any]]:
    """Steps of `model.onnx`, as an export writes it: keys and values go in and come out.

    They stay onnxruntime's between steps, without copies to NumPy.
    """
    from onnxruntime import OrtValue

    served = InferenceModel(model.cpu().eval(), forms=TRACED)
    if not has_past(served):
        raise Impossible("it does not read what it writes, or has no attention")
    inputs = case.inputs(served.spec.inputs)
    start = case.length - case.calls
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        session = open_steps(served, Path(folder) / MODEL, case.threads or 0)
    names = [each.name for each in session.get_inputs()]
    outputs = [each.name for each in session.get_outputs()]
    empty = [each.numpy() for pair in served.empty_past(case.batch) for each in pair]

    def read(tokens: Any, seen: int, past: list[Any]) -> tuple[Any, list[Any]]:
        """Logits [B, S, outputs] and the new past, of tokens [B, S] after `seen` others."""
        end = seen + tokens.shape[1]
        at = np.arange(seen, end)[None].repeat(case.batch, 0)
        own = (tokens, np.ones((case.batch, end), np.int64), at)
        values = [*map(OrtValue.ortvalue_from_numpy, own), *past]
        given = dict(zip(names, values, strict=True))
        logits, *present = session.run_with_ort_values(outputs, given)
        return logits.numpy(), present

    prompt, past = inputs[:, :start].numpy(), [OrtValue.ortvalue_from_numpy(e) for e in empty]
    if start:
        _, past = read(prompt, 0, past)
    token = inputs[:, start : start + 1].numpy()
    with torch.inference_mode():
        wanted = served(inputs[:, : start + 1], last=True)
    _check(torch.from_numpy(read(token, start, past)[0][:, -1]), wanted)

    def decode() -> Any:
        tokens, kept = token, past
        for step in range(case.calls):
            logits, kept = read(tokens, start + step, kept)
            tokens = logits[:, -1:].argmax(-1)
        return tokens

    cache = served.cache_bytes_per_token
    return decode, {"weight_bytes": served.weight_bytes, "cache_bytes_per_token": cache}


def hf(model: Transformer, case: Case) -> tuple[Action, dict[str, Any]]:
    """The form `hf` of the model, any structure, in transformers; prefill is compiled on a GPU.

    Steps are not: its cache has another size in each.
    """
    source = Source(Path("random"), model.cpu().eval(), {"task": {"name": "random"}}, {}, {})
    try:
        check_causal_lm(source, "hf")
        network = hf_model(source, case.dtype).to(case.device).eval()
    except ImportError as error:
        raise Impossible(f"transformers is not installed ({error})") from None
    except UserError as error:
        raise Impossible(str(error)) from None
    inputs = case.inputs(model.spec().inputs)
    weights = sum(each.numel() * each.element_size() for each in network.parameters())
    cache = InferenceModel(model, dtype=case.dtype).cache_bytes_per_token
    facts = {"weight_bytes": weights, "cache_bytes_per_token": cache}
    if case.phase == "prefill":
        compiled = case.device.startswith("cuda")
        forward: Any = network
        if compiled:
            forward = torch.compile(network, mode="reduce-overhead", dynamic=False)

        @torch.no_grad()
        def prefill() -> Tensor:
            # 0 stands for all positions.
            kept = {"logits_to_keep": int(case.last)}
            logits: Tensor = forward(input_ids=inputs, use_cache=False, **kept).logits
            return logits

        return prefill, {**facts, "compiled": compiled}
    from transformers import DynamicCache

    start = case.length - case.calls
    past = DynamicCache(config=network.config)
    if start:
        with torch.no_grad():
            network(input_ids=inputs[:, :start], past_key_values=past)

    @torch.no_grad()
    def decode() -> Tensor:
        if added := past.get_seq_length() - start:  # by the action before
            past.crop(-added)
        token = inputs[:, start : start + 1]
        for _ in range(case.calls):
            token = network(input_ids=token, past_key_values=past).logits[:, -1:].argmax(-1)
        return token

    return decode, {**facts, "compiled": False}
