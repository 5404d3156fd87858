"""Tiny models with a tokenizer: a Llama as a GGUF file, and imported; an imported BERT."""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np

from gaugelasso.importing.folder import write_imported
from tests.importing.sources import bert, write_gguf
from tests.tasks.tokenizers import byte_level, save, word_piece

WIDTH, FILTERS, LAYERS, HEADS, GROUPS, CONTEXT = 32, 48, 2, 4, 2, 64


def tokenizer_metadata(tokenizer: Any, split: str = "gpt-2") -> dict[str, Any]:
    """What a GGUF file says of a byte-level tokenizer."""
    data = json.loads(tokenizer.to_str())
    names = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    special = {token["content"] for token in data["added_tokens"] if token["special"]}
    merges = data["model"]["merges"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": split,
        "tokenizer.ggml.tokens": names,
        "tokenizer.ggml.token_type": [3 if name in special else 1 for name in names],
        "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in merges],
        "tokenizer.ggml.eos_token_id": tokenizer.token_to_id("<|end|>"),
    }


def tiny_gguf(
    path: Path, more: dict[str, Any], vocabulary: int = 300, context: int = CONTEXT
) -> Path:
    """A random model with this metadata beside its own."""
    random = np.random.default_rng(0)
    keys = WIDTH * GROUPS // HEADS
    shapes = {
        "attn_norm": (WIDTH,), "attn_q": (WIDTH, WIDTH), "attn_k": (keys, WIDTH),
        "attn_v": (keys, WIDTH), "attn_output": (WIDTH, WIDTH), "ffn_norm": (WIDTH,),
        "ffn_gate": (FILTERS, WIDTH), "ffn_up": (FILTERS, WIDTH), "ffn_down": (WIDTH, FILTERS),
    }  # fmt: skip
    every = {f"blk.{k}.{name}": shape for k in range(LAYERS) for name, shape in shapes.items()}
    every |= {"token_embd": (vocabulary, WIDTH), "output_norm": (WIDTH,)}
    tensors = {
        f"{name}.weight": random.normal(0.2, 0.1, shape).astype(np.float32)
        if len(shape) == 1
        else random.normal(0, 0.2, shape).astype(np.float32)
        for name, shape in every.items()
    }
    settings = {
        "general.architecture": "llama",
        "llama.block_count": LAYERS,
        "llama.context_length": context,
        "llama.embedding_length": WIDTH,
        "llama.feed_forward_length": FILTERS,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": GROUPS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
    }
    write_gguf(path, settings | more, tensors)
    return path


def write_base(folder: Path, context: int = CONTEXT) -> Path:
    """An imported model with its tokenizer, at folder/base."""
    folder.mkdir(parents=True, exist_ok=True)
    file = tiny_gguf(folder / "tiny.gguf", tokenizer_metadata(byte_level()), context=context)
    write_imported(file, folder / "base")
    return folder / "base"


def write_encoder(folder: Path, context: int) -> Path:
    """An imported encoder with a WordPiece tokenizer; its source is beside it."""
    tokenizer, source = word_piece(), folder.with_name(f"{folder.name}-source")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    sizes |= {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": context}
    with contextlib.redirect_stderr(io.StringIO()):  # a bar of progress
        bert(**sizes).save_pretrained(source)
    save(tokenizer, source / "tokenizer.json")
    write_imported(source, folder)
    return folder
