"""A folder with a stock Llama for Hugging Face transformers, and for what else reads such folders.

`config.json` has the keys of a `LlamaConfig`; no code of a model is in the folder.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gaugelasso.export.comparison import Comparison, Say
from gaugelasso.export.extras import quiet
from gaugelasso.export.source import Source
from gaugelasso.export.stock import stock_sizes, stock_weights
from gaugelasso.export.to_hf import check_causal_lm, without_progress_bars, write_tokenizer
from gaugelasso.files.durable import write_new
from gaugelasso.files.tensors import encoded
from gaugelasso.files.tokenizer import load_tokenizer, named_token
from gaugelasso.importing.decoder import FOLDER, Sizes, with_biases
from gaugelasso.importing.rope import Rope

CONFIG, WEIGHTS = "config.json", "model.safetensors"


def write_llama(source: Source, folder: Path, dtype: torch.dtype, device: str, say: Say) -> float:
    """Write the files, load them with transformers, and return the largest deviation."""
    check_causal_lm(source, "llama")
    sizes = stock_sizes(source, "llama")
    names = with_biases(FOLDER)
    weights = stock_weights(source.model, sizes, names, interleaved=False)
    config = llama_config(sizes, tied=names["head"] not in weights)
    config |= {"dtype": str(dtype).removeprefix("torch."), **_tokens(source)}
    if sizes.bias:  # transformers has one switch for these of queries, keys, values and outputs
        biases = [names["out"].format(k).replace(".weight", ".bias") for k in range(sizes.layers)]
        weights |= {name: torch.zeros(sizes.width) for name in biases}
    weights = {name: tensor.to(dtype) for name, tensor in weights.items()}
    write_new(folder / CONFIG, [(json.dumps(config, indent=2) + "\n").encode()])
    # Earlier versions of transformers refuse a file without this word.
    write_new(folder / WEIGHTS, encoded(weights, {"format": "pt"}))
    with quiet(), without_progress_bars():
        from transformers import AutoModelForCausalLM

        write_tokenizer(source, folder)
        # In float32 whatever the weights are in: many CPUs take minutes for products in float16.
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False
        ).eval()

    def step(tokens: Tensor, mask: Tensor, positions: Tensor, past: Any) -> tuple[Tensor, Any]:
        output = loaded(
            tokens,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=past,
            use_cache=True,
        )
        return output.logits, output.past_key_values

    def whole(tokens: Tensor) -> Tensor:
        return loaded(tokens, use_cache=False).logits

    return Comparison(source, dtype, say, in_float32=True).check(WEIGHTS, whole=whole, step=step)


def llama_config(sizes: Sizes, tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": sizes.vocabulary,
        "hidden_size": sizes.width,
        "intermediate_size": sizes.d_f,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.d_k,
        "hidden_act": "silu",
        "max_position_embeddings": sizes.length,
        "rms_norm_eps": sizes.eps,
        "rope_theta": sizes.rope.theta,
        "rope_scaling": _scaling(sizes.rope),
        "attention_bias": sizes.bias,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "use_cache": True,
    }


def _scaling(rope: Rope) -> dict[str, Any] | None:
    if rope.bands is not None:
        return {
            "rope_type": "llama3",
            "factor": rope.factor,
            "low_freq_factor": rope.bands.low,
            "high_freq_factor": rope.bands.high,
            "original_max_position_embeddings": int(rope.bands.context),
        }
    return None if rope.factor == 1 else {"rope_type": "linear", "factor": rope.factor}


def _tokens(source: Source) -> dict[str, int | None]:
    """Tokens that begin and end a text, and that fill a batch; a config without them has others."""
    kinds = [f"{kind}_token" for kind in ("bos", "eos", "pad")]
    if not source.has_tokenizer:
        return {f"{kind}_id": None for kind in kinds}
    tokenizer = load_tokenizer(source.run)
    return {f"{kind}_id": named_token(tokenizer, source.run, kind) for kind in kinds}
