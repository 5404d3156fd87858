"""One GGUF file with a stock Llama and its tokenizer, for llama.cpp and its relatives.

Matrices are in the chosen precision, norms in float32. The stream and the filters are padded with
zeros to multiples of 32: other widths are slow in llama.cpp, and its quantised types need blocks of
32. Read back by this package's own importer.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from gaugelasso.errors import UserError
from gaugelasso.export.comparison import Comparison, Say
from gaugelasso.export.gguf_tokenizer import check_tokenizer, of_run, tokenizer_metadata
from gaugelasso.export.source import Source
from gaugelasso.export.stock import stock_sizes, stock_weights
from gaugelasso.export.to_hf import check_causal_lm
from gaugelasso.files.durable import write_new
from gaugelasso.files.gguf import Value, encoded
from gaugelasso.files.tokenizer import NAME as TOKENIZER
from gaugelasso.importing import build
from gaugelasso.importing.decoder import GGUF, Sizes
from gaugelasso.importing.gguf import open_gguf
from gaugelasso.importing.rope import FACTORS, Rope
from gaugelasso.inference import InferenceModel
from gaugelasso.models import TransformerSpec
from gaugelasso.runs.reading import exists

NAME = "model.gguf"
# Of numbers in a row.
_BLOCK = 32
# Numbers by which a file says in which type most of its tensors are.
_FILE_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 32}


def write_gguf(source: Source, folder: Path, dtype: torch.dtype, device: str, say: Say) -> float:
    """Write the file, read it again, and return the largest deviation."""
    path = folder / NAME
    write_new(path, content(source, dtype))
    written = open_gguf(path)
    check_tokenizer(source, written)
    served = InferenceModel(build(written).eval())
    return Comparison(source, dtype, say, in_float32=True).check(NAME, whole=served)


def content(source: Source, dtype: torch.dtype) -> Iterator[bytes | memoryview]:
    """The bytes of the file, part by part."""
    check_causal_lm(source, "gguf")
    sizes = stock_sizes(source, "gguf", _BLOCK)
    _check_no_biases(source.spec, source.run)
    weights = stock_weights(source.model, sizes, GGUF, interleaved=True)
    tensors = {name: each.to(dtype) if each.dim() > 1 else each for name, each in weights.items()}
    tensors |= _divisors(sizes)
    metadata = {
        "general.architecture": "llama",
        "general.name": source.run.resolve().name,
        "general.file_type": _FILE_TYPES[dtype],
        **_settings(sizes),
        **tokenizer_metadata(source),
    }
    return encoded(metadata, tensors)


def check_gguf(spec: TransformerSpec, path: Path, tokenizer: Path | None) -> None:
    """UserError if no cut makes this stock Llama one that a file holds, with this tokenizer.

    `path` is where the model is. The tokenizer is a folder, or its file there.
    """
    _check_no_biases(spec, path)
    if tokenizer is None:
        return
    folder = tokenizer.parent if tokenizer.name == TOKENIZER else tokenizer
    if exists(folder / TOKENIZER):
        of_run(folder, spec.inputs)


def _check_no_biases(spec: TransformerSpec, path: Path) -> None:
    if spec.attention_bias:
        raise UserError(
            f"form 'gguf' holds no biases of queries, keys and values, which {str(path)!r} has; "
            "choose llama, hf, onnx, pt2 or native"
        )


def _settings(sizes: Sizes) -> dict[str, Value]:
    found: dict[str, Value] = {
        "context_length": sizes.length,
        "embedding_length": sizes.width,
        "block_count": sizes.layers,
        "feed_forward_length": sizes.d_f,
        "vocab_size": sizes.vocabulary,
        "attention.head_count": sizes.heads,
        "attention.head_count_kv": sizes.kv_heads,
        # Else a reader would take the width of the stream over the heads.
        "attention.key_length": sizes.d_k,
        "attention.value_length": sizes.d_k,
        "attention.layer_norm_rms_epsilon": sizes.eps,
        "rope.dimension_count": sizes.d_k,
        "rope.freq_base": sizes.rope.theta,
    }
    if sizes.rope.bands is None and sizes.rope.factor != 1:
        found |= {"rope.scaling.type": "linear", "rope.scaling.factor": sizes.rope.factor}
    return {f"llama.{key}": value for key, value in found.items()}


def _divisors(sizes: Sizes) -> dict[str, Tensor]:
    """What divides the frequencies of RoPE scaled by `llama3`, for which there are no keys."""
    if sizes.rope.bands is None:
        return {}
    pairs = sizes.d_k // 2
    plain = torch.tensor(Rope(sizes.rope.theta).frequencies(pairs), dtype=torch.float64)
    scaled = torch.tensor(sizes.rope.frequencies(pairs), dtype=torch.float64)
    return {FACTORS: (plain / scaled).float()}
