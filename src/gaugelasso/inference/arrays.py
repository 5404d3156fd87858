"""A step of decoding one sequence on a CPU, by NumPy, on the memory of an `InferenceModel`.

Between the products of a step stand some twenty small operations for each operator. A product of
one row reads so many weights that the code of the operations has left a core's cache after it, and
NumPy has several times less code to fetch than PyTorch. Results are those of PyTorch's step but for
rounding. Not every model has this form: `supported` says which.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from gaugelasso.inference.cache import Pair
from gaugelasso.inference.operators import Attention, Classifier, HiddenClassifier, Mlp
from gaugelasso.inference.stream import Matrix, Read, Write
from gaugelasso.inference.tied import TiedClassifier, TiedEmbedding
from gaugelasso.kernels.stream import EPS

if TYPE_CHECKING:
    from gaugelasso.inference.folded import FoldedModel

Array = npt.NDArray[Any]


def supported(model: "FoldedModel") -> bool:
    """Causal attention and SwiGLU on a CPU, in float32 or float64, without norms of their own."""
    parts = model.operators.values()
    plain = not model.norms and not isinstance(model.classifier, HiddenClassifier)
    return (
        model.generates
        and model.device.type == "cpu"
        and model.dtype in (torch.float32, torch.float64)
        and model.folding.align == 1
        and plain
        and all(isinstance(part, Mlp | Attention) for part in parts)
        and all(part.norm is None for part in model.attentions().values())
        and all(part.scale is None for part in model.modules() if isinstance(part, Matrix))
    )


class ArrayStep:
    """Call it with a token, the keys and values of every attention operator, and the position."""

    def __init__(self, model: "FoldedModel"):
        self._embed = _embedding(model)
        self._operators = [
            _Attention(part) if isinstance(part, Attention) else _mlp(part)
            for part in model.operators.values()
        ]
        self._logits = _classifier(model)

    def __call__(self, token: int, cache: list[Pair], at: int) -> Array:
        """Logits [outputs]; the new keys and values are stored in the cache at position `at`."""
        pairs = iter(cache)
        x = self._embed(token, at)
        with np.errstate(over="ignore"):  # of the exponential in a gate that is closed
            for operator in self._operators:
                if isinstance(operator, _Attention):
                    operator(x, *next(pairs), at)
                else:
                    operator(x)
        return self._logits(x)


def _embedding(model: "FoldedModel") -> Callable[[int, int], Array]:
    part = model.embedding
    table = part.table.numpy()
    positions = None if part.positions is None else part.positions.numpy()
    scale = columns = None
    if isinstance(part, TiedEmbedding):
        scale = part.scale.numpy()
        columns = None if part.whole else part.column_of_site.numpy()

    def embed(token: int, at: int) -> Array:
        x = table[token].copy() if scale is None else table[token] * scale
        if columns is not None:
            x = np.append(x, x.dtype.type(0))[columns]
        if positions is not None:
            x += positions[at]
        return x

    return embed


def _classifier(model: "FoldedModel") -> Callable[[Array], Array]:
    part = model.classifier
    assert isinstance(part, Classifier | TiedClassifier)
    rows = _tied(model, part) if isinstance(part, TiedClassifier) else _reading(part.read)
    if part.bias is None:
        return rows
    bias = part.bias.numpy()
    return lambda x: rows(x) + bias


def _tied(model: "FoldedModel", part: TiedClassifier) -> Callable[[Array], Array]:
    sites, weight, gain = part.sites.numpy(), part.weight.numpy(), part.gain.numpy()
    table, eps = model.embedding.table.numpy(), part.eps
    means = None
    if part.mean is not None and part.spread is not None:
        means = part.spread.numpy(), part.mean.numpy()

    def rows(x: Array) -> Array:
        read = _normalised(x[sites], weight, eps) * gain
        out: Array = np.dot(table, read)
        if means is not None:
            out += np.dot(read, means[0]) * means[1]
        return out

    return rows


def _normalised(picked: Array, weight: Array, eps: float) -> Array:
    level = float(np.dot(picked * picked, weight)) + eps
    return picked * picked.dtype.type(1 / math.sqrt(level) if level > EPS else 0.0)


def _reading(read: Read) -> Callable[[Array], Array]:
    """`stream.Read` of one token."""
    sites: slice | Array = slice(read.start, read.stop)
    if not read.window and read.first is None:
        sites = read.sites.numpy()
    maps, eps = read.maps().numpy(), read.eps
    weight = None if read.weight is None else read.weight.numpy()

    def call(x: Array) -> Array:
        picked = x[sites]
        if weight is not None:
            picked = _normalised(picked, weight, eps)
        out: Array = np.dot(picked, maps)
        return out

    return call


def _writing(write: Write) -> Callable[[Array, Array], None]:
    """`stream.Write` of one token, in place."""
    sites: slice | Array = slice(write.start, write.stop)
    spread = write.sites.numpy() if write.form == "spread" else None
    if write.form != "window" and write.first is None:
        sites = write.sites.numpy()
    maps = write.maps().numpy()
    bias = None if write.bias is None else write.bias.numpy()

    def call(x: Array, h: Array) -> None:
        u = np.dot(h, maps)
        if bias is not None:
            u += bias
        if spread is not None:
            x += np.append(u, u.dtype.type(0))[spread]
        else:
            x[sites] += u

    return call


def _mlp(part: Any) -> Callable[[Array], None]:
    assert isinstance(part, Mlp)
    read, write, paired = _reading(part.read), _writing(part.write), part.read.paired

    def call(x: Array) -> None:
        up, gate = read(x).reshape(-1, 2).T if paired else read(x).reshape(2, -1)
        write(x, up * gate / (1 + np.exp(-gate)))

    return call


class _Attention:
    def __init__(self, part: Attention):
        self.heads, self.groups, self.d_k = part.heads, part.groups, part.d_k
        self.read, self.write = _reading(part.read), _writing(part.write)
        self.bias = None if part.bias is None else part.bias.numpy()
        self.window = part.window
        self.angles = None
        if part.angles is not None:
            self.angles = part.angles[0].numpy(), part.angles[1].numpy()

    def __call__(self, x: Array, keys: Array, values: Array, at: int) -> None:
        rows = self.read(x)
        if self.bias is not None:
            rows += self.bias
        count = self.heads + self.groups
        turned = rows[: count * self.d_k].reshape(count, -1)
        if self.angles is not None:
            cos, sin = self.angles[0][at], self.angles[1][at]
            first, second = turned[:, : len(cos)], turned[:, len(cos) :]
            crossed = first * sin
            first *= cos
            first -= second * sin
            second *= cos
            second += crossed
        keys[:, at] = turned[self.heads :]
        values[:, at] = rows[count * self.d_k :].reshape(self.groups, -1)
        start = 0 if self.window is None else max(0, at + 1 - self.window)
        seen = slice(start, at + 1)
        # The heads of a group are queries of the same keys.
        queries = turned[: self.heads].reshape(self.groups, -1, self.d_k)
        scores = queries @ keys[:, seen].transpose(0, 2, 1)
        scores -= scores.max(2, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(2, keepdims=True)
        self.write(x, (scores @ values[:, seen]).reshape(-1))
