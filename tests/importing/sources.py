"""Tiny random models, as transformers saves them, and Llama models as GGUF files."""

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

# Grouped keys, and no value that is a default. Widths are multiples of a block of 32.
SIZES: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 40,
    "rms_norm_eps": 3e-4, "tie_word_embeddings": False,
}  # fmt: skip
THETA = 531.0
# Of the eight pairs of a head of SIZES, two are high, two between, four low.
LLAMA3 = {
    "rope_type": "llama3", "factor": 6.0, "low_freq_factor": 1.5, "high_freq_factor": 9.0,
    "original_max_position_embeddings": 200,
}  # fmt: skip


def llama(**settings: Any) -> "LlamaForCausalLM":
    """A random model, with gains that differ and weights large enough for sharp attention."""
    from transformers import LlamaConfig, LlamaForCausalLM  # above, it would cost every worker 4 s

    return _random(LlamaForCausalLM, LlamaConfig, settings)


def _random(model_class: Any, config_class: Any, settings: Mapping[str, Any]) -> Any:
    rope = {"rope_type": "default", "rope_theta": THETA} | settings.get("rope_parameters", {})
    torch.manual_seed(0)
    model = model_class(config_class(**{**SIZES, **settings, "rope_parameters": rope}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
            elif "embed" not in name:
                parameter.normal_(std=0.15)
    return model.eval()


def mistral(**settings: Any) -> Any:
    from transformers import MistralConfig, MistralForCausalLM

    return _random(MistralForCausalLM, MistralConfig, {"sliding_window": None} | settings)


def qwen2(**settings: Any) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return _random(Qwen2ForCausalLM, Qwen2Config, settings)


def qwen3(**settings: Any) -> Any:
    """As `llama`; queries of all heads are wider than the stream."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return _random(Qwen3ForCausalLM, Qwen3Config, {"head_dim": 24} | settings)


def gpt2(**settings: Any) -> Any:
    """As `llama`; biases and means of rows are far from zero, so that each has an effect."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {
        "vocab_size": 50, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_inner": 96,
        "n_positions": 40, "layer_norm_epsilon": 3e-3, "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    torch.manual_seed(0)
    return _rough(GPT2LMHeadModel(GPT2Config(**{**sizes, **settings})))


def bert(masked_lm: bool = True, **settings: Any) -> Any:
    """As `gpt2`: a masked language model, or an encoder without a pooler."""
    from transformers import BertConfig, BertForMaskedLM, BertModel

    sizes = {
        "vocab_size": 50, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 96, "max_position_embeddings": 40, "layer_norm_eps": 3e-3,
    }  # fmt: skip
    torch.manual_seed(0)
    config = BertConfig(**{**sizes, **settings})
    return _rough(BertForMaskedLM(config) if masked_lm else BertModel(config, False))


def roberta(masked_lm: bool = True, **settings: Any) -> Any:
    """As `bert`; positions begin at the third row, after the padding token 2."""
    from transformers import RobertaConfig, RobertaForMaskedLM, RobertaModel

    sizes = {
        "vocab_size": 50, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 96, "max_position_embeddings": 43, "layer_norm_eps": 3e-3,
        "pad_token_id": 2,
    }  # fmt: skip
    torch.manual_seed(0)
    config = RobertaConfig(**{**sizes, **settings})
    return _rough(RobertaForMaskedLM(config) if masked_lm else RobertaModel(config, False))


def distilbert(masked_lm: bool = True, **settings: Any) -> Any:
    """As `bert`."""
    from transformers import DistilBertConfig, DistilBertForMaskedLM, DistilBertModel

    sizes = {
        "vocab_size": 50, "dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 96,
        "max_position_embeddings": 40,
    }  # fmt: skip
    torch.manual_seed(0)
    config = DistilBertConfig(**{**sizes, **settings})
    return _rough(DistilBertForMaskedLM(config) if masked_lm else DistilBertModel(config))


def vit(classes: int | None = 7, **settings: Any) -> Any:
    """As `gpt2`: a classifier of images, or without classes an encoder without a pooler."""
    from transformers import ViTConfig, ViTForImageClassification, ViTModel

    sizes = {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 96, "image_size": 12, "patch_size": 4, "num_channels": 2,
        "layer_norm_eps": 3e-3, "num_labels": classes or 2,
    }  # fmt: skip
    torch.manual_seed(0)
    config = ViTConfig(**{**sizes, **settings})
    return _rough(ViTForImageClassification(config) if classes else ViTModel(config, False))


def _rough(model: Any) -> Any:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(mean=0.05, std=0.15)
            elif name.endswith("bias"):
                parameter.normal_()
            else:
                parameter.uniform_(0.5, 1.5)
    return model.eval()


def tokens() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(SIZES["vocab_size"], (3, 40), generator=generator)


def distance(new: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, relative to the standard deviation."""
    return float((new - expected).abs().max() / expected.std())


# --- GGUF -----------------------------------------------------------------------------------

TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8, "Q5_K": 13, "BF16": 30}
_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "model.layers": "blk", "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}  # fmt: skip


def metadata(model: Any) -> dict[str, Any]:
    c = model.config
    kind = "llama" if c.model_type == "mistral" else c.model_type
    d_k = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    return {
        "general.architecture": kind,
        "general.name": "tiny",
        f"{kind}.block_count": c.num_hidden_layers,
        f"{kind}.context_length": c.max_position_embeddings,
        f"{kind}.embedding_length": c.hidden_size,
        f"{kind}.feed_forward_length": c.intermediate_size,
        f"{kind}.attention.head_count": c.num_attention_heads,
        f"{kind}.attention.head_count_kv": c.num_key_value_heads,
        f"{kind}.attention.layer_norm_rms_epsilon": c.rms_norm_eps,
        f"{kind}.rope.freq_base": THETA,
        f"{kind}.rope.dimension_count": d_k,
        f"{kind}.attention.key_length": d_k,
        f"{kind}.attention.value_length": d_k,
        "tokenizer.ggml.tokens": [f"token {i}" for i in range(c.vocab_size)],
        "tokenizer.ggml.scores": [float(i) for i in range(c.vocab_size)],
    }


def gguf_tensors(model: Any) -> dict[str, np.ndarray]:
    """The weights under the names of a GGUF file; for Llama, RoPE pairs next to each other."""
    config = model.config
    found = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        for part, heads in (
            ("q_proj", config.num_attention_heads),
            ("k_proj", config.num_key_value_heads),
        ):
            if part in name and config.model_type in ("llama", "mistral"):
                values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2)
                values = values.reshape(tensor.shape)
        for theirs, ours in _NAMES.items():
            name = name.replace(theirs, ours)
        found[name] = values
    return found


def write_gguf(
    path: Path,
    settings: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    kind: str = "F32",
    version: int = 3,
) -> None:
    """Matrices in the given type, vectors in float32."""
    header = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(settings))
    for key, value in settings.items():
        header += _text(key) + _value(value)
    body = b""
    for name, values in tensors.items():
        chosen = kind if values.ndim > 1 else "F32"
        header += _text(name) + struct.pack("<I", values.ndim)
        header += struct.pack(f"<{values.ndim}Q", *reversed(values.shape))
        header += struct.pack("<IQ", TYPES[chosen], len(body))
        body += quantised(values, chosen)
        body += bytes(-len(body) % 32)
    path.write_bytes(header + bytes(-len(header) % 32) + body)


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    each = [_value(one) for one in value]
    return (
        struct.pack("<I", 9)
        + each[0][:4]
        + struct.pack("<Q", len(each))
        + b"".join(one[4:] for one in each)
    )


def quantised(values: np.ndarray, kind: str) -> bytes:
    """The bytes of a tensor; blocks are along the last dim."""
    if kind == "F32":
        return values.astype("<f4").tobytes()
    if kind == "F16":
        return values.astype("<f2").tobytes()
    if kind == "BF16":
        return (values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    blocks = values.reshape(-1, 32)
    if kind == "Q8_0":
        scale = (np.abs(blocks).max(1, keepdims=True) / 127).astype("<f2")
        q = np.round(blocks / scale).clip(-127, 127).astype(np.int8)
        return np.concatenate([scale.view(np.uint8), q.view(np.uint8)], axis=1).tobytes()
    if kind == "Q4_1":
        low, high = blocks.min(1, keepdims=True), blocks.max(1, keepdims=True)
        scale, low = ((high - low) / 15).astype("<f2"), low.astype("<f2")
        q = np.round((blocks - low) / scale).clip(0, 15).astype(np.uint8)
        packed = q[:, :16] | q[:, 16:] << 4
        return np.concatenate([scale.view(np.uint8), low.view(np.uint8), packed], axis=1).tobytes()
    return bytes(values.size)  # a type that is refused before its bytes are read


def dequantised(values: np.ndarray, kind: str) -> np.ndarray:
    """What a reader must make of `quantised`, block by block, in plain arithmetic."""
    if values.ndim == 1 or kind == "F32":
        return values
    data = quantised(values, kind)
    if kind == "F16":
        return np.frombuffer(data, "<f2").astype(np.float32).reshape(values.shape)
    size = {"Q8_0": 34, "Q4_1": 20}[kind]
    result: list[float] = []
    for at in range(0, len(data), size):
        block = data[at : at + size]
        [scale] = struct.unpack("<e", block[:2])
        if kind == "Q8_0":
            result += [scale * q for q in struct.unpack("<32b", block[2:])]
        else:
            [low] = struct.unpack("<e", block[2:4])
            result += [scale * (q & 15) + low for q in block[4:]]
            result += [scale * (q >> 4) + low for q in block[4:]]
    return np.array(result, dtype=np.float32).reshape(values.shape)
