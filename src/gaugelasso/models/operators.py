"""The operators between the two ends of the stream: attention and SwiGLU.

Activations are feature-major, as in layers.py, and so are the shapes' names.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from gaugelasso.axes import Axis, Cost, Slot
from gaugelasso.models.layers import Extractor, Injector, Part, normal
from gaugelasso.models.spec import AttentionSpec, MlpSpec, OperatorSpec


class Operator(Part):
    """A part that reads the stream and writes back to it, and may vanish."""

    read: Extractor
    write: Injector

    def forward(self, x: Tensor, batch: int) -> Tensor:
        """[D, N] of `batch` sequences -> what goes to the injector, [d_out, N]."""
        raise NotImplementedError

    def spec(self) -> OperatorSpec:
        """The operator's structure, read off its tensors."""
        raise NotImplementedError


class Attention(Operator):
    """Multi-head attention; RoPE by pairs where frequencies are given; grouped keys."""

    frequencies: Tensor

    def __init__(
        self,
        spec: AttentionSpec,
        *,
        causal: bool,
        tied: bool,
        shrink: float,
        generator: torch.Generator,
    ):
        super().__init__()
        d_in, d_out = len(spec.reads), len(spec.writes)
        self.depth = spec.depth
        # The scale at birth: a narrower head must not become a sharper one.
        self.softmax_scale = spec.scale
        self.causal = causal
        self.rope = spec.frequencies is not None
        pair = (2,) if self.rope else ()
        self.read = Extractor(spec.reads, tied=tied)
        std = d_in**-0.5
        self.query = normal((d_in, spec.heads, *pair, spec.keys), std, generator)
        self.key = normal((d_in, spec.kv_heads, *pair, spec.keys), std, generator)
        self.value = normal((d_in, spec.kv_heads, spec.values), std, generator)
        std = shrink * (spec.heads * spec.values) ** -0.5
        self.out = normal((spec.heads, spec.values, d_out), std, generator)
        if spec.frequencies is not None:
            self.register_buffer("frequencies", torch.tensor(spec.frequencies))
        self.write = Injector(spec.writes)

    def forward(self, x: Tensor, batch: int) -> Tensor:
        y = self.read(x)
        heads, groups = self.query.shape[1], self.key.shape[1]
        d_k, d_v = self.query[0, 0].numel(), self.value.shape[2]
        maps = torch.cat([self.query.flatten(1), self.key.flatten(1), self.value.flatten(1)], 1)
        projected = (maps.T @ y).view(-1, batch, y.shape[1] // batch)
        qk, v = projected.split([(heads + groups) * d_k, groups * d_v])
        if self.rope:
            qk = rotate(qk.unflatten(0, (heads + groups, 2, -1)), self.frequencies)
        qk = qk.reshape(heads + groups, d_k, *qk.shape[-2:])
        q, k = qk.split([heads, groups])
        v = v.unflatten(0, (groups, d_v))
        # [heads, d, B, S] -> [B, heads, S, d]
        q, k, v = (t.permute(2, 0, 3, 1) for t in (q, k, v))
        mixed = attend(q, k, v, self.softmax_scale, self.causal)
        mixed = mixed.permute(1, 3, 0, 2).reshape(heads * d_v, -1)
        return self.out.flatten(0, 1).T @ mixed

    def axes(self, name: str) -> list[Axis]:
        pairs_dim = 3 if self.rope else 2
        frequencies = (Slot(f"{name}.frequencies"),) if self.rope else ()
        reads = tuple(Slot(f"{name}.{leaf}") for leaf in ("query", "key", "value"))
        return [
            Extractor.axis(name, "d_ai", reads),
            Axis(
                f"{name}.d_k",
                "d_k",
                (Slot(f"{name}.query", pairs_dim),),
                (Slot(f"{name}.key", pairs_dim),),
                frequencies,
                owner=name,
                silences=False,
            ),
            Axis(
                f"{name}.d_v",
                "d_v",
                (Slot(f"{name}.value", 2),),
                (Slot(f"{name}.out", 1),),
                owner=name,
            ),
            Injector.axis(name, "d_ao", (Slot(f"{name}.out", 2),)),
        ]

    def fixed(self, name: str) -> list[Slot]:
        slots = [Slot(f"{name}.{leaf}", 1) for leaf in ("query", "key", "value")]
        if self.rope:
            slots += [Slot(f"{name}.{leaf}", 2) for leaf in ("query", "key")]
        return [*slots, Slot(f"{name}.out", 0)]

    def matrices(self, name: str) -> dict[str, int]:
        return {f"{name}.query": 1, f"{name}.key": 1, f"{name}.value": 1, f"{name}.out": 2}

    def costs(self, name: str) -> list[Cost]:
        heads, groups = self.query.shape[1], self.key.shape[1]
        unit = 2 if self.rope else 1
        d_ai, d_k, d_v, d_ao = (f"{name}.{kind}" for kind in ("d_ai", "d_k", "d_v", "d_ao"))
        costs = [
            Cost("scale", 1, (d_ai,)),
            Cost("matmul", (heads + groups) * unit, (d_ai, d_k)),
            Cost("matmul", groups, (d_ai, d_v)),
            Cost("scores", heads, (d_k,), unit=unit),
            Cost("mix", heads, (d_v,)),
            Cost("matmul", heads, (d_v, d_ao)),
            Cost("scale", 1, (d_ao,)),
        ]
        return [*costs, Cost("rotation", heads, (d_k,))] if self.rope else costs

    def spec(self) -> AttentionSpec:
        return AttentionSpec(
            depth=self.depth,
            reads=tuple(self.read.sites.tolist()),
            writes=tuple(self.write.sites.tolist()),
            heads=self.query.shape[1],
            kv_heads=self.key.shape[1],
            keys=self.query.shape[-1],
            values=self.value.shape[-1],
            scale=self.softmax_scale,
            frequencies=tuple(self.frequencies.tolist()) if self.rope else None,
        )


def rotate(x: Tensor, frequencies: Tensor) -> Tensor:
    """RoPE: turn pair p at position t by t * f_p. x [heads, 2, P, B, S]."""
    positions = torch.arange(x.shape[-1], device=x.device, dtype=frequencies.dtype)
    angle = (frequencies[:, None] * positions)[:, None]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x.unbind(1)
    return torch.stack([first * cos - second * sin, first * sin + second * cos], dim=1)


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
    """softmax(scale q k^T) v over [B, heads, S, d], with d_k and d_v of any size."""
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    d_v = v.shape[-1]
    # Fused kernels want equal, contiguous widths, on a GPU in multiples of 8; zero
    # channels change nothing.
    wide = max(q.shape[-1], d_v)
    if q.is_cuda:
        wide = -(-wide // 8) * 8
    q, k, v = (F.pad(t, (0, wide - t.shape[-1])).contiguous() for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)[..., :d_v]


class SwiGLU(Operator):
    """down(up(y) * silu(gate(y)))."""

    def __init__(self, spec: MlpSpec, *, tied: bool, shrink: float, generator: torch.Generator):
        super().__init__()
        d_in, d_out = len(spec.reads), len(spec.writes)
        self.depth = spec.depth
        self.read = Extractor(spec.reads, tied=tied)
        self.up = normal((d_in, spec.filters), d_in**-0.5, generator)
        self.gate = normal((d_in, spec.filters), d_in**-0.5, generator)
        self.down = normal((spec.filters, d_out), shrink * spec.filters**-0.5, generator)
        self.write = Injector(spec.writes)

    def forward(self, x: Tensor, batch: int) -> Tensor:
        y = self.read(x)
        up, gate = (torch.cat([self.up, self.gate], 1).T @ y).chunk(2)
        return self.down.T @ (up * F.silu(gate))

    def axes(self, name: str) -> list[Axis]:
        return [
            Extractor.axis(name, "d_mi", (Slot(f"{name}.up"), Slot(f"{name}.gate"))),
            Axis(
                f"{name}.d_f",
                "d_f",
                (Slot(f"{name}.up", 1),),
                (Slot(f"{name}.down"),),
                (Slot(f"{name}.gate", 1),),
                owner=name,
            ),
            Injector.axis(name, "d_mo", (Slot(f"{name}.down", 1),)),
        ]

    def matrices(self, name: str) -> dict[str, int]:
        return {f"{name}.up": 1, f"{name}.gate": 1, f"{name}.down": 1}

    def costs(self, name: str) -> list[Cost]:
        d_mi, d_f, d_mo = (f"{name}.{kind}" for kind in ("d_mi", "d_f", "d_mo"))
        return [
            Cost("scale", 1, (d_mi,)),
            Cost("matmul", 2, (d_mi, d_f)),
            Cost("matmul", 1, (d_f, d_mo)),
            Cost("scale", 1, (d_mo,)),
        ]

    def spec(self) -> MlpSpec:
        reads, writes = (tuple(t.sites.tolist()) for t in (self.read, self.write))
        return MlpSpec(self.depth, reads, writes, self.up.shape[1])
