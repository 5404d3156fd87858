"""The programs that `serving.py` compares: each turns a model and a case into an action to time.

An engine that cannot do a case raises `Impossible` with the reason, which the report keeps.
"""

import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from benchmarks.exported_engines import hf, onnxruntime
from benchmarks.serving_case import Action, Case, Impossible
from torch import Tensor

from gaugelasso.export import to_gguf
from gaugelasso.export.source import Source
from gaugelasso.files.durable import write_new
from gaugelasso.inference import InferenceModel, Sampling, tuned
from gaugelasso.inference.graphs import Decoder
from gaugelasso.models import Transformer, TransformerSpec
from gaugelasso.models.operator_spec import AttentionSpec, MlpSpec


def gaugelasso(model: Transformer, case: Case) -> tuple[Action, dict[str, Any]]:
    """Our inference form, tuned for the case; on a GPU as CUDA graphs."""
    served, action = gaugelasso_model(model, case)
    return action, _facts(served)


def gaugelasso_model(model: Transformer, case: Case) -> tuple[InferenceModel, Action]:
    """The tuned model, and the action."""
    model = model.to(case.device).eval()
    inputs = case.inputs(model.spec().inputs)
    if case.phase == "prefill":
        served = tuned(model, inputs, dtype=case.dtype)
        captured = served.captured().reserve(case.batch, case.length)

        def prefill() -> Tensor:
            return captured(inputs, last=case.last)

        return served, prefill
    served = tuned(model, inputs[:, :1], dtype=case.dtype)
    served.check_generates()
    gpu = case.device.startswith("cuda")
    decoder = Decoder(served, case.batch, case.length, Sampling(0), case.calls, gpu)
    start = case.length - case.calls

    @torch.inference_mode()
    def decode() -> Tensor:
        decoder.rewind_()
        decoder.cache.hold_(start)
        for step in range(case.calls):
            decoder.cache.longest = start + step
            decoder.step()
        return decoder.out

    return served, decode


def _facts(served: InferenceModel) -> dict[str, Any]:
    forms = list(served.forms.values())
    kinds = ("read", "write", "attention", "step")
    chosen = {kind: dict(Counter(getattr(form, kind) for form in forms)) for kind in kinds}
    facts = {"weight_bytes": served.weight_bytes, "forms": chosen, "stream": served.embedding.order}
    if served.generates:
        facts["cache_bytes_per_token"] = served.cache_bytes_per_token
    return facts


def llama_shapes(spec: TransformerSpec) -> dict[str, int]:
    """The arguments of a `LlamaConfig` of the same shapes; Impossible if there is none.

    Its width is a multiple of the heads: transformers wants that, and the form `llama` has it.
    """
    size = len(spec.sites)
    shapes = set()
    pairs = list(zip(spec.operators[::2], spec.operators[1::2], strict=False))
    for attention, mlp in pairs:
        if not isinstance(attention, AttentionSpec) or not isinstance(mlp, MlpSpec):
            raise Impossible("its layers are not attention and MLP in turns")
        widths = {len(each) for op in (attention, mlp) for each in (op.reads, op.writes)}
        if widths != {size}:
            raise Impossible("its layers do not read and write the whole stream")
        if attention.frequencies is None or 2 * attention.keys != attention.values:
            raise Impossible("its keys have no RoPE, or not the width of its values")
        shapes.add((attention.heads, attention.kv_heads, attention.values, mlp.filters))
    if len(shapes) != 1 or 2 * len(pairs) != len(spec.operators):
        raise Impossible("its layers are not all equal")
    if not spec.causal or spec.input_kind != "tokens":
        raise Impossible("it is not a causal model over tokens")
    heads, groups, width, filters = shapes.pop()
    return {
        "vocab_size": max(spec.inputs, spec.outputs),
        "hidden_size": -(-size // heads) * heads,
        "intermediate_size": filters,
        "num_hidden_layers": len(pairs),
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": width,
        "max_position_embeddings": spec.length,
    }


def transformers(model: Transformer, case: Case) -> tuple[Action, dict[str, Any]]:
    """A Llama of the same shapes in Hugging Face transformers, compiled on a GPU."""
    shapes = llama_shapes(model.spec())
    try:
        from transformers import LlamaConfig, LlamaForCausalLM, StaticCache
    except ImportError as error:
        raise Impossible(f"transformers is not installed ({error})") from None
    config = LlamaConfig(**shapes, tie_word_embeddings=False, attn_implementation="sdpa")
    llama = LlamaForCausalLM(config).to(case.device, case.dtype).eval()
    inputs = case.inputs(shapes["vocab_size"])
    forward: Callable[..., Any] = llama
    if case.device.startswith("cuda"):
        forward = torch.compile(llama, mode="reduce-overhead", dynamic=False)
    facts = {
        "weight_bytes": sum(each.numel() * each.element_size() for each in llama.parameters()),
        "cache_bytes_per_token": 2 * case.dtype.itemsize * shapes["num_hidden_layers"]
        * shapes["num_key_value_heads"] * shapes["head_dim"],
    }  # fmt: skip
    if case.phase == "prefill":

        @torch.no_grad()
        def prefill() -> Tensor:
            # 0 stands for all positions.
            kept = {"logits_to_keep": int(case.last)}
            logits: Tensor = forward(input_ids=inputs, use_cache=False, **kept).logits
            return logits

        return prefill, facts
    cache = StaticCache(config=config, max_cache_len=case.length)
    start = case.length - case.calls
    with torch.no_grad():  # fills the cache, not compiled: so its tensors get fixed addresses
        llama(input_ids=inputs[:, : max(1, start)], past_key_values=cache, use_cache=True)
    lengths = [getattr(layer, "cumulative_length", None) for layer in cache.layers]
    if not all(isinstance(each, Tensor) for each in lengths):
        raise Impossible("this version of transformers has another static cache")
    places = torch.arange(case.length, device=case.device)

    @torch.no_grad()
    def decode() -> Tensor:
        for each in lengths:
            each.fill_(start)
        token = inputs[:, :1]
        for step in range(case.calls):
            if case.device.startswith("cuda"):
                torch.compiler.cudagraph_mark_step_begin()
            at = places[start + step].expand(case.batch, 1)
            logits = forward(
                input_ids=token, position_ids=at, past_key_values=cache, use_cache=True
            ).logits
            token = logits[:, -1:].argmax(-1)
        return token

    return decode, facts


def llama_cpp(model: Transformer, case: Case) -> tuple[Action, dict[str, Any]]:
    """A GGUF file of the model in float16, in llama.cpp on a CPU, one sequence at a time."""
    if case.device != "cpu" or case.batch != 1:
        raise Impossible("only one sequence on a CPU is measured here")
    llama_shapes(model.spec())
    try:
        from llama_cpp import Llama
    except ImportError as error:
        raise Impossible(f"llama-cpp-python is not installed ({error})") from None
    source = Source(Path("random"), model.cpu().eval(), {"task": {"name": "random"}}, {}, {})
    tokens = case.inputs(model.spec().inputs)[0].tolist()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write_new(path, to_gguf.content(source, torch.float16))
        size = path.stat().st_size
        engine = Llama(
            str(path), n_ctx=case.length, n_batch=case.length, n_ubatch=case.length,
            n_threads=case.threads, n_threads_batch=case.threads, verbose=False,
            logits_all=case.phase == "prefill" and not case.last,  # as the others
        )  # fmt: skip
    start = case.length - case.calls if case.phase == "decode" else 0
    if start:
        engine.eval(tokens[:start])

    def forward() -> None:
        engine.n_tokens = start
        if case.phase == "prefill":
            engine.eval(tokens)
            return
        for token in tokens[start:]:
            engine.eval([token])

    return forward, {"weight_bytes": size, "dtype": "float16"}


ENGINES = {
    "gaugelasso": gaugelasso,
    "transformers": transformers,
    "hf": hf,
    "onnxruntime": onnxruntime,
    "llama.cpp": llama_cpp,
}
