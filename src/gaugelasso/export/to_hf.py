"""A folder for Hugging Face transformers: weights, config and one modelling file with its code.

The modelling file is `modeling_gaugelasso.py` of this package, copied as it is. It needs torch and
transformers, and not this package.
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gaugelasso.errors import UserError, errors_of, first_line
from gaugelasso.export.comparison import Comparison, Say
from gaugelasso.export.extras import quiet
from gaugelasso.export.source import Source
from gaugelasso.files.tokenizer import (
    NAME,
    SETTINGS,
    byte_names,
    end_token,
    load_tokenizer,
    read_files,
)
from gaugelasso.files.untrusted import parse_light
from gaugelasso.inference import Form, InferenceModel
from gaugelasso.models import AttentionSpec, TransformerSpec

# What both tokenizers must read alike: words, numbers, line breaks, characters of several bytes.
TEXTS = ("It's 1,984 o'clock.\n\n  The café — 日本語?", " a b ", "def f(x):\n\treturn x")
# Kinds of MLP that are no SwiGLU, and the approximation of their GELU.
_GELU = {"gelu": "none", "gelu_tanh": "tanh"}
CODE = Path(__file__).with_name("modeling_gaugelasso.py")


def write_hf(source: Source, folder: Path, dtype: torch.dtype, device: str, say: Say) -> float:
    """Write the files, load them with transformers, and return the largest deviation."""
    check_causal_lm(source, "hf")
    from gaugelasso.export.modeling_gaugelasso import GaugelassoForCausalLM

    with quiet(), without_progress_bars():
        model = hf_model(source, dtype)
        model.save_pretrained(folder)
        (folder / CODE.name).write_bytes(CODE.read_bytes())
        for path in folder.glob("*.safetensors"):  # written for the owner alone
            path.chmod((folder / CODE.name).stat().st_mode)
        write_tokenizer(source, folder, model.config)
        loaded: Any = GaugelassoForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    def step(tokens: Tensor, mask: Tensor, positions: Tensor, past: Any) -> tuple[Tensor, Any]:
        output = loaded(tokens, attention_mask=mask, past_key_values=past)
        return output.logits, output.past_key_values

    def whole(tokens: Tensor) -> Tensor:
        return loaded(tokens, use_cache=False).logits

    return Comparison(source, dtype, say).check(
        "model.safetensors", whole=whole, step=step if model.config.use_cache else None
    )


def hf_model(source: Source, dtype: torch.dtype) -> Any:
    """The model of the modelling file, with the weights of the source."""
    from gaugelasso.export.modeling_gaugelasso import GaugelassoConfig, GaugelassoForCausalLM

    config = GaugelassoConfig(
        **_widths(source.spec),
        use_cache=any(isinstance(op, AttentionSpec) for op in source.spec.operators),
        # A batch of unequal prompts is padded with it; the mask hides it.
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=_end(source),
        dtype=str(dtype).removeprefix("torch."),
        architectures=["GaugelassoForCausalLM"],
        auto_map={
            "AutoConfig": f"{CODE.stem}.GaugelassoConfig",
            "AutoModelForCausalLM": f"{CODE.stem}.GaugelassoForCausalLM",
        },
    )
    model: Any = GaugelassoForCausalLM(config)
    model.to(dtype)
    model.load_state_dict(_tensors(source, dtype))
    return model


@contextlib.contextmanager
def without_progress_bars() -> Iterator[None]:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def check_causal_lm(source: Source, form: str) -> None:
    """UserError if the model is no causal language model, which is what the form holds."""
    spec = source.spec
    why = None
    if spec.input_kind != "tokens":
        why = "it reads patches, not tokens"
    elif not spec.causal:
        why = "every position sees the whole sequence"
    elif spec.outputs > spec.inputs:
        why = f"it has {spec.outputs} outputs for {spec.inputs} tokens and cannot read them"
    elif spec.head_hidden:
        why = "its head has a hidden layer"
    if why:
        raise UserError(
            f"form {form!r} holds causal language models, and {str(source.run)!r} is none: {why}; "
            "choose onnx, pt2 or native"
        )


def _widths(spec: TransformerSpec) -> dict[str, Any]:
    """The structure as the modelling file's config has it."""
    operators: list[dict[str, Any]] = []
    for op in spec.operators:
        table = {
            "name": op.name, "kind": op.kind, "reads": len(op.reads), "writes": len(op.writes),
        }  # fmt: skip
        table |= {"write_bias": True} if spec.write_bias else {}
        if isinstance(op, AttentionSpec):
            rotary = op.frequencies is not None
            table |= {"bias": True} if spec.attention_bias else {}
            table |= {"qk_norm": True} if spec.qk_norm else {}
            table |= {"window": op.window} if op.window is not None else {}
            table |= {
                "heads": op.heads,
                "kv_heads": op.kv_heads,
                "d_k": 2 * op.keys if rotary else op.keys,
                "d_v": op.values,
                "frequencies": list(op.frequencies) if op.frequencies is not None else None,
            }
        else:
            table["filters"] = op.filters
            table |= {"gelu": _GELU[spec.mlp]} if spec.mlp in _GELU else {}
        operators.append(table)
    return {
        "vocab_size": spec.inputs,
        "outputs": spec.outputs,
        "hidden_size": len(spec.sites),
        "max_position_embeddings": spec.length,
        "learned_positions": spec.positions,
        "classifier_reads": len(spec.classify),
        "rms_norm_eps": spec.eps,
        "classifier_bias": spec.head_bias,
        "tied_columns": len(spec.embed) if spec.tied_head else 0,
        "tied_mean": spec.tied_mean,
        "operators": operators,
    }


def _tensors(source: Source, dtype: torch.dtype) -> dict[str, Tensor]:
    """The inference form's tensors under the names of the modelling file."""
    served = InferenceModel(source.model, dtype=dtype, forms=Form("gather", "scatter"))
    return {
        name.replace(".maps.values", ".maps"): tensor
        for name, tensor in served.state_dict().items()
        if not name.endswith((".cos", ".sin"))
    }


def _end(source: Source) -> int | None:
    """The token that ends a text."""
    return end_token(load_tokenizer(source.run), source.run) if source.has_tokenizer else None


def write_tokenizer(source: Source, folder: Path, config: Any = None) -> None:
    """The run's tokenizer, that of bytes for a text of bytes, or none.

    `config` is that of the model, where transformers has none of its own for it.
    """
    if source.has_tokenizer:
        copy_tokenizer(source, folder, config)
    elif source.is_text:
        write_byte_tokenizer(folder, source.spec.length)


def copy_tokenizer(source: Source, folder: Path, config: Any = None) -> None:
    """Copy the files of the run's tokenizer; UserError if transformers reads another one of them.

    `tokenizer_class` is set to the class that takes tokenizer.json as it is: others build some of
    its parts anew.
    """
    from transformers import AutoTokenizer

    ours = load_tokenizer(source.run)
    ours.check_fits(source.spec.inputs, "the model")
    files = read_files(source.run)
    with errors_of(source.run / SETTINGS):
        settings = _parsed(files.pop(SETTINGS, b"{}"))
    # Some tokenizers have code of their own, which a name here would ask for.
    settings.pop("auto_map", None)
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    settings.setdefault("clean_up_tokenization_spaces", False)
    for name, content in {**files, SETTINGS: json.dumps(settings, indent=1).encode()}.items():
        (folder / name).write_bytes(content)
    # With the config at hand, transformers neither asks whether to run the folder's code to get it,
    # nor reads it as one of another model, with a warning.
    theirs = AutoTokenizer.from_pretrained(
        folder, config=config, local_files_only=True, trust_remote_code=False
    )
    for text in TEXTS:
        if theirs.encode(text, add_special_tokens=False) != ours.encode([text])[0].tolist():
            raise UserError(
                f"{str(source.run / NAME)!r}: transformers reads another tokenizer from it, so "
                "nothing was written"
            )


def _parsed(content: bytes) -> dict[str, Any]:
    try:
        found = parse_light(content)
    except (ValueError, RecursionError) as error:
        raise UserError(f"not valid JSON ({first_line(error)})") from None
    if not isinstance(found, dict):
        raise UserError("not a JSON object")
    return found


def write_byte_tokenizer(folder: Path, length: int) -> None:
    """A tokenizer whose ids are the bytes of a text in UTF-8."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = byte_names()
    tokenizer = Tokenizer(
        models.BPE(vocab={name: byte for byte, name in enumerate(names)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=names[0],
        padding_side="left",
        model_max_length=length,
        clean_up_tokenization_spaces=False,
        # The name of byte 0 is also a letter, which a text may contain.
        split_special_tokens=True,
    ).save_pretrained(folder)
