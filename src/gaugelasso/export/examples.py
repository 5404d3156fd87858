"""The program on a model card that loads a form and uses it, complete enough to paste."""

from pathlib import Path

import torch

from gaugelasso.export.source import Source
from gaugelasso.export.traced import has_past
from gaugelasso.files.tokenizer import NAME as TOKENIZER
from gaugelasso.models import TransformerSpec

# Prompts: of a text, and of any other tokens.
_TEXT, _TOKENS = b"The ", (0, 1, 2, 3)
_NEW = 20


def example(source: Source, form: str, out: Path, dtype: torch.dtype) -> str:
    """Greedy generation if the model generates, else the outputs of one sequence."""
    spec = source.spec
    precision = str(dtype).removeprefix("torch.")
    names = {"out": out.as_posix(), "precision": precision}
    if not generates(spec) or (form in _ARRAYS and not has_past(source.served())):
        return _WHOLE[form].format(inputs=_zeros(spec, form, precision), **names)
    given = tuple(_TEXT) if source.is_text else tuple(min(t, spec.inputs - 1) for t in _TOKENS)
    prompt = given[: max(1, spec.length - 1)]
    names |= {
        "new": str(max(1, min(_NEW, spec.length - len(prompt)))),
        "prompt": f'list(b"{bytes(prompt).decode()}")' if source.is_text else str(list(prompt)),
        "shown": 'bytes(new_tokens).decode(errors="replace")' if source.is_text else "new_tokens",
        "imports": "",
        "opened": "",
    }
    if reads_tokenizer(source, form):
        names |= {
            "prompt": f'tokenizer.encode("{_TEXT.decode()}", add_special_tokens=False).ids',
            "shown": "tokenizer.decode(new_tokens)",
            "imports": "from tokenizers import Tokenizer\n",
            "opened": f'tokenizer = Tokenizer.from_file("{names["out"]}/{TOKENIZER}")\n',
        }
    if form in _TRUST:
        names["trust"] = _TRUST[form]
        if source.is_text:
            return _HF_TEXT.format(text=bytes(prompt).decode(), more=", padding=True", **names)
        if source.has_tokenizer:
            return _HF_TEXT.format(text=_TEXT.decode(), more="", **names)
        return _HF_TOKENS.format(**names)
    return _GENERATE[form].format(**names)


def reads_tokenizer(source: Source, form: str) -> bool:
    """Whether the program reads tokenizer.json beside the model by itself."""
    return source.has_tokenizer and form in (*_ARRAYS, "native") and generates(source.spec)


def generates(spec: TransformerSpec) -> bool:
    """Whether the model reads the tokens that it writes."""
    return spec.causal and spec.input_kind == "tokens" and spec.outputs <= spec.inputs


def _zeros(spec: TransformerSpec, form: str, precision: str) -> str:
    library = "np" if form == "onnx" else "torch"
    if spec.input_kind == "tokens":
        return f"{library}.zeros((1, {spec.length}), dtype={library}.int64)"
    width = spec.inputs + (spec.input_kind == "masked_patches")
    return f"{library}.zeros((1, {spec.length}, {width}), dtype={library}.{precision})"


# Forms whose example passes keys and values on by itself.
_ARRAYS = ("onnx", "pt2")
# Forms that transformers loads, and what allows it to run their code.
_TRUST = {"hf": ", trust_remote_code=True", "llama": ""}
_WHOLE = {
    "native": """\
import torch
from gaugelasso.inference import load

model = load("{out}", dtype=torch.{precision})
with torch.inference_mode():
    outputs = model({inputs})
print(outputs.shape)
""",
    "onnx": """\
import numpy as np
import onnxruntime

session = onnxruntime.InferenceSession("{out}/model.onnx")
name = session.get_inputs()[0].name
(outputs,) = session.run(None, {{name: {inputs}}})
print(outputs.shape)
""",
    "pt2": """\
import torch

model = torch.export.load("{out}/model.pt2").module()
# Compiled for the machine of the export, and faster:
# model = torch._inductor.aoti_load_package("{out}/model.cpu.pt2")
with torch.inference_mode():
    outputs = model({inputs})
print(outputs.shape)
""",
}
_GENERATE = {
    "native": """\
import torch
from gaugelasso.inference import Sampling, generate, load
{imports}
{opened}model = load("{out}", dtype=torch.{precision})
greedy = Sampling(temperature=0)
[new_tokens] = generate(model, [{prompt}], max_new_tokens={new}, sampling=greedy)
print({shown})
""",
    "onnx": """\
import numpy as np
import onnxruntime
{imports}
{opened}session = onnxruntime.InferenceSession("{out}/model.onnx")
shapes = {{each.name: each.shape for each in session.get_inputs()[3:]}}
past = {{
    name: np.zeros((1, heads, 0, width), np.{precision})
    for name, (_, heads, _, width) in shapes.items()
}}
tokens, seen, new_tokens = np.array([{prompt}]), 0, []
for _ in range({new}):
    positions = np.arange(seen, seen + tokens.shape[1])[None]
    seen += tokens.shape[1]
    inputs = {{
        "input_ids": tokens,
        "attention_mask": np.ones((1, seen), np.int64),
        "position_ids": positions,
    }}
    logits, *present = session.run(None, inputs | past)
    past = dict(zip(past, present))
    tokens = logits[:, -1:].argmax(-1)
    new_tokens.append(int(tokens[0, 0]))
print({shown})
""",
    "pt2": """\
import json
import torch
{imports}
{opened}model = torch.export.load("{out}/model.pt2").module()
# Compiled for the machine of the export, and faster; its inputs must be contiguous:
# model = torch._inductor.aoti_load_package("{out}/model.cpu.pt2")
with open("{out}/cache.json") as file:
    widths = json.load(file)  # heads, width of keys, width of values, for every layer
past = [
    tuple(torch.zeros(1, heads, 0, width, dtype=torch.{precision}) for width in (d_k, d_v))
    for heads, d_k, d_v in widths
]
tokens, seen, new_tokens = torch.tensor([{prompt}]), 0, []
with torch.inference_mode():
    for _ in range({new}):
        positions = torch.arange(seen, seen + tokens.shape[1])[None]
        seen += tokens.shape[1]
        mask = torch.ones(1, seen, dtype=torch.long)
        logits, past = model(tokens, mask, positions, past)
        tokens = logits[:, -1:].argmax(-1).contiguous()
        new_tokens.append(int(tokens))
print({shown})
""",
    "gguf": """\
from gaugelasso import import_model
from gaugelasso.inference import InferenceModel, Sampling, generate

model = InferenceModel(import_model("{out}/model.gguf").eval())
greedy = Sampling(temperature=0)
[new_tokens] = generate(model, [{prompt}], max_new_tokens={new}, sampling=greedy)
print({shown})
""",
}
_HF_TOKENS = """\
import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{out}"{trust})
prompt = torch.tensor([{prompt}])
mask = torch.ones_like(prompt)
output = model.generate(prompt, attention_mask=mask, max_new_tokens={new}, do_sample=False)
new_tokens = output[0, prompt.shape[1] :].tolist()
print({shown})
"""
_HF_TEXT = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{out}"{trust})
model = AutoModelForCausalLM.from_pretrained("{out}"{trust})
inputs = tokenizer(["{text}"], return_tensors="pt"{more})
inputs.pop("token_type_ids", None)
output = model.generate(**inputs, max_new_tokens={new}, do_sample=False)
new_tokens = output[0, inputs["input_ids"].shape[1] :].tolist()
print(tokenizer.decode(new_tokens))
"""
