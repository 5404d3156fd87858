"""The tensor types of GGUF files that are read, each with what turns its blocks into numbers.

A block is a fixed number of bytes that hold a fixed number of elements. `d` is the scale of a
block and `m` its offset, both float16; numbers are little-endian.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

Blocks = np.ndarray


@dataclass(frozen=True)
class Format:
    """A tensor type. `decode` turns bytes [blocks, size] into float32 [blocks, elements]."""

    name: str
    elements: int
    size: int
    decode: Callable[[Blocks], np.ndarray]


def _half(blocks: Blocks, at: int) -> np.ndarray:
    """The float16 at a byte of every block, [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: Blocks) -> np.ndarray:
    """First the lower four bits of every byte, then the upper four, along the last dim."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _fifth_bits(blocks: Blocks, at: int) -> np.ndarray:
    """One bit for each of 32 elements, as the value 16 or 0."""
    return np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little") << 4


def _f32(blocks: Blocks) -> np.ndarray:
    return blocks.view("<f4").astype(np.float32)


def _f16(blocks: Blocks) -> np.ndarray:
    return blocks.view("<f2").astype(np.float32)


def _bf16(blocks: Blocks) -> np.ndarray:
    """The upper half of a float32."""
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _q4_0(blocks: Blocks) -> np.ndarray:
    """d (q - 8), q of four bits."""
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).astype(np.float32) - 8)


def _q4_1(blocks: Blocks) -> np.ndarray:
    """d q + m, q of four bits."""
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]) + _half(blocks, 2)


def _q5_0(blocks: Blocks) -> np.ndarray:
    """d (q - 16), q of five bits."""
    q = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)
    return _half(blocks, 0) * (q.astype(np.float32) - 16)


def _q5_1(blocks: Blocks) -> np.ndarray:
    """d q + m, q of five bits."""
    q = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)
    return _half(blocks, 0) * q + _half(blocks, 2)


def _q8_0(blocks: Blocks) -> np.ndarray:
    """d q, q of eight bits with a sign."""
    return _half(blocks, 0) * blocks[:, 2:].view(np.int8)


def _q4_k(blocks: Blocks) -> np.ndarray:
    """d s q - m t for eight groups of 32, each with a scale s and an offset t of six bits.

    Twelve bytes hold s and t: the lower six bits of the first four bytes are s of groups 0 to 3,
    those of the next four are t of groups 0 to 3. The last four bytes have the lower four bits of
    s and t of groups 4 to 7, whose upper two bits are at the top of the first eight bytes.
    """
    first, second, third = (blocks[:, at : at + 4] for at in (4, 8, 12))
    scale = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=1)
    offset = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=1)
    q = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    scale, offset = _half(blocks, 0) * scale, _half(blocks, 2) * offset
    return (scale[..., None] * q - offset[..., None]).reshape(-1, 256)


def _q6_k(blocks: Blocks) -> np.ndarray:
    """d s (q - 32) for sixteen groups of 16, each with a scale s of eight bits with a sign.

    Each half of a block has 64 bytes with the lower four bits of q, and 32 bytes with the upper
    two, for the elements 0 to 31, 32 to 63, 64 to 95 and 96 to 127 in that order.
    """
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    packed = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    high = packed >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    q = (low | high << 4).astype(np.float32) - 32
    scale = _half(blocks, 208) * np.ascontiguousarray(blocks[:, 192:208]).view(np.int8)
    return (scale[..., None] * q.reshape(-1, 16, 16)).reshape(-1, 256)


# By the number of the type in a file.
FORMATS: Mapping[int, Format] = {
    0: Format("F32", 1, 4, _f32),
    1: Format("F16", 1, 2, _f16),
    2: Format("Q4_0", 32, 18, _q4_0),
    3: Format("Q4_1", 32, 20, _q4_1),
    6: Format("Q5_0", 32, 22, _q5_0),
    7: Format("Q5_1", 32, 24, _q5_1),
    8: Format("Q8_0", 32, 34, _q8_0),
    12: Format("Q4_K", 256, 144, _q4_k),
    14: Format("Q6_K", 256, 210, _q6_k),
    30: Format("BF16", 1, 2, _bf16),
}
# Types that are refused by name.
OTHERS: Mapping[int, str] = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 13: "Q5_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS",
    18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8",
    25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
