"""GGUF files: decoded blocks, the order of RoPE pairs, and refusals by name."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gaugelasso import UserError, import_model
from gaugelasso.importing.quantised import FORMATS
from tests.importing.sources import (
    LLAMA3,
    THETA,
    dequantised,
    distance,
    gguf_tensors,
    llama,
    metadata,
    tokens,
    write_gguf,
)

BY_NAME = {form.name: form for form in FORMATS.values()}


def rounded(kind: str, **settings: Any) -> Any:
    """A model whose weights are what a file of this type holds."""
    model = llama(**settings)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.from_numpy(dequantised(parameter.numpy(), kind)))
    return model


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_1"])
@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_those_of_the_decoded_weights(kind: str, tied: bool, tmp_path: Path) -> None:
    model = llama(tie_word_embeddings=tied)
    write_gguf(tmp_path / "m.gguf", metadata(model), gguf_tensors(model), kind)
    found = import_model(tmp_path / "m.gguf")
    with torch.inference_mode():
        expected = rounded(kind, tie_word_embeddings=tied)(tokens()).logits
        assert distance(found(tokens()), expected) < 1e-5


@pytest.mark.parametrize("key", ["llama.rope.scaling.factor", "llama.rope.scale_linear"])
def test_linear_scaling_of_rope_is_read(key: str, tmp_path: Path) -> None:
    model = llama(rope_parameters={"rope_type": "linear", "factor": 3.0})
    write_gguf(tmp_path / "m.gguf", metadata(model) | {key: 3.0}, gguf_tensors(model))
    with torch.inference_mode():
        expected = model(tokens()).logits
        assert distance(import_model(tmp_path / "m.gguf")(tokens()), expected) < 1e-5
    contradiction = {key: 3.0, "llama.rope.scaling.type": "none"}
    write_gguf(tmp_path / "m.gguf", metadata(model) | contradiction, gguf_tensors(model))
    with pytest.raises(UserError, match="'none': contradicts the factor of 3"):
        import_model(tmp_path / "m.gguf")


def test_divisors_of_rope_are_read(tmp_path: Path) -> None:
    """A converter stores the scaling of Llama 3 as a tensor."""
    model, path = llama(rope_parameters=LLAMA3), tmp_path / "m.gguf"
    plain = THETA ** -(torch.arange(8) / 8)
    factors = (plain / model.model.rotary_emb.inv_freq).numpy()
    write_gguf(path, metadata(model), gguf_tensors(model) | {"rope_freqs.weight": factors})
    with torch.inference_mode():
        assert distance(import_model(path)(tokens()), model(tokens()).logits) < 1e-5
    for wrong, named in ((factors[1:], r"has the shape \(7,\)"), (0 * factors, "holds 0;")):
        write_gguf(path, metadata(model), gguf_tensors(model) | {"rope_freqs.weight": wrong})
        with pytest.raises(UserError, match=f"'rope_freqs.weight' {named}"):
            import_model(path)


def test_version_2_is_read(tmp_path: Path) -> None:
    model = llama()
    for version in (2, 3):
        path = tmp_path / f"{version}.gguf"
        write_gguf(path, metadata(model), gguf_tensors(model), version=version)
    two, three = (import_model(tmp_path / f"{version}.gguf")(tokens()) for version in (2, 3))
    assert torch.equal(two, three)


HALF, TWO = struct.pack("<e", 0.5), struct.pack("<e", 2.0)
# Bytes 0x10, 0x32, ...: the lower bits are 0, 2, 4, ..., the upper ones 1, 3, 5, ...
NIBBLES = bytes(range(0x10, 0x100, 0x22)) * 2
LOW, HIGH = [0, 2, 4, 6, 8, 10, 12, 14], [1, 3, 5, 7, 9, 11, 13, 15]
FOUR = [*LOW, *LOW, *HIGH, *HIGH]
# The fifth bits of the first and of the last element.
FIFTH = struct.pack("<I", 1 | 1 << 31)
FIVE = [16, *FOUR[1:-1], 31]


@pytest.mark.parametrize(
    ("kind", "block", "expected"),
    [
        ("F32", struct.pack("<f", -1.5), [-1.5]),
        ("F16", struct.pack("<e", -1.5), [-1.5]),
        ("BF16", b"\xc0\xbf", [-1.5]),
        ("Q4_0", HALF + NIBBLES, [0.5 * (q - 8) for q in FOUR]),
        ("Q4_1", HALF + TWO + NIBBLES, [0.5 * q + 2 for q in FOUR]),
        ("Q5_0", HALF + FIFTH + NIBBLES, [0.5 * (q - 16) for q in FIVE]),
        ("Q5_1", HALF + TWO + FIFTH + NIBBLES, [0.5 * q + 2 for q in FIVE]),
        ("Q8_0", HALF + struct.pack("<32b", *range(-16, 16)), [q / 2 for q in range(-16, 16)]),
    ],
)
def test_a_block_by_hand(kind: str, block: bytes, expected: list[float]) -> None:
    form = BY_NAME[kind]
    assert (form.size, form.elements) == (len(block), len(expected))
    raw = np.frombuffer(block * 3, np.uint8).reshape(3, -1)
    assert form.decode(raw).tolist() == [expected] * 3


def test_a_block_of_q4_k_element_by_element() -> None:
    generator = np.random.default_rng(3)
    s, t = generator.integers(0, 64, (2, 8))
    q = generator.integers(0, 16, 256)
    packed = [s[i] | s[i + 4] >> 4 << 6 for i in range(4)]
    packed += [t[i] | t[i + 4] >> 4 << 6 for i in range(4)]
    packed += [s[i + 4] & 15 | (t[i + 4] & 15) << 4 for i in range(4)]
    for start in range(0, 256, 64):
        packed += [q[start + i] | q[start + 32 + i] << 4 for i in range(32)]
    block = HALF + TWO + bytes(int(byte) for byte in packed)
    expected = [0.5 * s[i // 32] * q[i] - 2 * t[i // 32] for i in range(256)]
    assert BY_NAME["Q4_K"].decode(np.frombuffer(block, np.uint8)[None])[0].tolist() == expected


def test_a_block_of_q6_k_element_by_element() -> None:
    generator = np.random.default_rng(4)
    s, q = generator.integers(-128, 128, 16), generator.integers(0, 64, 256)
    low, high = [], []
    for half in (q[:128], q[128:]):
        low += [half[i] & 15 | (half[i + 64] & 15) << 4 for i in range(64)]
        high += [sum(int(half[i + 32 * k]) >> 4 << 2 * k for k in range(4)) for i in range(32)]
    block = bytes(int(byte) for byte in [*low, *high, *(s % 256)]) + HALF
    expected = [0.5 * s[i // 16] * (q[i] - 32) for i in range(256)]
    assert BY_NAME["Q6_K"].decode(np.frombuffer(block, np.uint8)[None])[0].tolist() == expected


REFUSED: dict[str, tuple[str, Any]] = {
    "'gemma'": ("general.architecture", "gemma"),
    r"llama\.rope\.scaling\.type = 'yarn'": ("llama.rope.scaling.type", "yarn"),
    r"llama\.rope\.scaling\.factor = 0\.5: must be at": ("llama.rope.scaling.factor", 0.5),
    r"llama\.rope\.scaling\.attn_factor": ("llama.rope.scaling.attn_factor", 2.0),
    r"llama\.rope\.dimension_count = 8": ("llama.rope.dimension_count", 8),
    r"llama\.expert_count = 8": ("llama.expert_count", 8),
    r"llama\.attention\.sliding_window = 8": ("llama.attention.sliding_window", 8),
    r"llama\.attention\.value_length = 8": ("llama.attention.value_length", 8),
    r"llama\.logit_scale = 0.5": ("llama.logit_scale", 0.5),
    r"llama\.attention\.causal = False": ("llama.attention.causal", False),
    r"llama\.attention\.head_count = Array": ("llama.attention.head_count", [4, 4]),
    r"token_embd\.weight": ("llama.vocab_size", 51),
    r"blk\.2\.": ("llama.block_count", 2**31),
    r"blk\.1\.": ("llama.block_count", 1),
    r"general\.alignment": ("general.alignment", 12),
}


@pytest.mark.parametrize("named", REFUSED)
def test_what_cannot_be_represented_is_refused_by_name(named: str, tmp_path: Path) -> None:
    model, path = llama(), tmp_path / "m.gguf"
    key, value = REFUSED[named]
    write_gguf(path, metadata(model) | {key: value}, gguf_tensors(model))
    with pytest.raises(UserError, match=named) as refused:
        import_model(path)
    assert str(path) in str(refused.value)


def test_a_type_that_is_not_decoded_is_named(tmp_path: Path) -> None:
    model = llama()
    write_gguf(tmp_path / "m.gguf", metadata(model), gguf_tensors(model), "Q5_K")
    with pytest.raises(UserError, match=r"'token_embd\.weight' has the type Q5_K; only F32"):
        import_model(tmp_path / "m.gguf")


@pytest.mark.parametrize("name", ["blk.0.attn_q.bias", "rope_factors_long.weight"])
def test_a_tensor_without_a_place_is_refused(name: str, tmp_path: Path) -> None:
    model = llama()
    tensors = gguf_tensors(model) | {name: np.zeros(64, np.float32)}
    write_gguf(tmp_path / "m.gguf", metadata(model), tensors)
    with pytest.raises(UserError, match=name):
        import_model(tmp_path / "m.gguf")


def test_a_nan_is_named(tmp_path: Path) -> None:
    model = llama()
    tensors = gguf_tensors(model)
    tensors["output_norm.weight"][3] = np.nan
    write_gguf(tmp_path / "m.gguf", metadata(model), tensors)
    with pytest.raises(UserError, match=r"'output_norm\.weight' holds a value that is not"):
        import_model(tmp_path / "m.gguf")


def test_another_byte_order_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
    with pytest.raises(UserError, match="big-endian"):
        import_model(path)
