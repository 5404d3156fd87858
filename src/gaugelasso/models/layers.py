"""Operators on a residual stream of sites, each with its own widths and its own axes.

Activations are feature-major, [features, tokens]: a site is one contiguous row, so
reading and writing some sites moves whole rows, and matrix products keep an aligned
leading dimension whatever the width. Every removable index is a whole tensor dim.

Shapes: D sites, N = B*S tokens, d widths, H query heads, G key/value heads, P pairs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gaugelasso.axes import Axis, Cost, Norm, Slot
from gaugelasso.models.spec import AttentionSpec, MlpSpec, OperatorSpec

# Far below any level that the normalisers are anchored to.
EPS = 1e-8
# Large enough that a step of Adam is small beside it, small enough to be relearned.
EMBED_STD = 0.1


def _normal(shape: tuple[int, ...], std: float, generator: torch.Generator) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, generator=generator) * std)


class Extractor(nn.Module):
    """y_j = gain_j x[s_j] / sqrt(sum_i weight_i x[s_i]^2 + eps).

    At birth weight = 1/D: the textbook RMSNorm. The weights are a buffer that
    follows the gain slowly (gauge.follow_gain_), which keeps every coupling exactly
    bilinear. `tied` uses gain^2 / sum gain^2 instead: the paper's prescaled RMS.
    """

    sites: Tensor
    weight: Tensor
    energy: Tensor

    def __init__(self, sites: tuple[int, ...], *, tied: bool):
        super().__init__()
        self.tied = tied
        self.gain = nn.Parameter(torch.ones(len(sites)))
        self.register_buffer("sites", torch.tensor(sites, dtype=torch.long))
        self.register_buffer("weight", torch.full((len(sites),), 1 / len(sites)))
        self.register_buffer("energy", torch.ones(len(sites)))

    def forward(self, x: Tensor) -> Tensor:
        picked = x.index_select(0, self.sites)
        square = picked.square()
        if self.training:
            self.energy.copy_(square.detach().mean(dim=1))
        weight = self.weight
        if self.tied:
            weight = self.gain.square() / self.gain.square().sum()
        scale = ((weight[:, None] * square).sum(dim=0) + EPS).rsqrt()
        return self.gain[:, None] * picked * scale

    def norm(self, name: str) -> Norm:
        return Norm(f"{name}.gain", f"{name}.weight", f"{name}.energy")

    @staticmethod
    def riders(name: str) -> tuple[Slot, ...]:
        return tuple(Slot(f"{name}.{leaf}") for leaf in ("sites", "weight", "energy"))


class Injector(nn.Module):
    """x[t_j] += scale_j u_j."""

    sites: Tensor

    def __init__(self, sites: tuple[int, ...]):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(len(sites)))
        self.register_buffer("sites", torch.tensor(sites, dtype=torch.long))

    def forward(self, x: Tensor, u: Tensor) -> Tensor:
        # In place: no backward pass needs the stream's own values.
        return x.index_add_(0, self.sites, self.scale[:, None] * u)


class Part(nn.Module):
    """What every operator tells the axis table about itself, under the name it goes by."""

    def axes(self, name: str) -> list[Axis]:
        raise NotImplementedError

    def fixed(self, name: str) -> list[Slot]:
        return []

    def matrices(self, name: str) -> dict[str, int]:
        raise NotImplementedError

    def costs(self, name: str) -> list[Cost]:
        raise NotImplementedError


class Embedding(Part):
    """Rows of a table (tokens) or a linear map (patches), plus learned positions."""

    def __init__(
        self,
        inputs: int,
        sites: tuple[int, ...],
        length: int,
        *,
        tokens: bool,
        positions: bool,
        generator: torch.Generator,
    ):
        super().__init__()
        self.tokens = tokens
        std = EMBED_STD if tokens else inputs**-0.5
        self.table = _normal((inputs, len(sites)), std, generator)
        self.positions = _normal((length, len(sites)), EMBED_STD, generator) if positions else None
        self.write = Injector(sites)

    def forward(self, inputs: Tensor) -> Tensor:
        """[B, S] tokens or [B, S, n] patches -> [d, N]."""
        if self.tokens:
            rows = look_up(self.table, inputs.reshape(-1))
        else:
            rows = inputs.flatten(0, 1) @ self.table
        if self.positions is not None:
            length = inputs.shape[1]
            rows = rows.view(-1, length, rows.shape[1]) + self.positions[:length]
            rows = rows.flatten(0, 1)
        return rows.T

    def axes(self, name: str) -> list[Axis]:
        side_a = [Slot(f"{name}.table", 1)]
        if self.positions is not None:
            side_a.append(Slot(f"{name}.positions", 1))
        return [
            Axis(
                f"{name}.d_e",
                "d_e",
                tuple(side_a),
                (Slot(f"{name}.write.scale"),),
                (Slot(f"{name}.write.sites"),),
                owner=name,
            )
        ]

    def fixed(self, name: str) -> list[Slot]:
        slots = [Slot(f"{name}.table", 0)]
        if self.positions is not None:
            slots.append(Slot(f"{name}.positions", 0))
        return slots

    def matrices(self, name: str) -> dict[str, int]:
        return {} if self.tokens else {f"{name}.table": 1}

    def costs(self, name: str) -> list[Cost]:
        axis = (f"{name}.d_e",)
        costs = [Cost("lookup" if self.tokens else "matmul", self.table.shape[0], axis)]
        if self.positions is not None:
            costs.append(Cost("lookup", self.positions.shape[0], axis))
        return [*costs, Cost("scale", 1, axis)]


def look_up(table: Tensor, tokens: Tensor) -> Tensor:
    """Rows of a table. The two forms differ in their backward pass alone."""
    if table.is_cuda:
        return table.index_select(0, tokens)  # adds without sorting: safe to capture
    return F.embedding(tokens, table)  # on a CPU the other form visits rows one by one


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
        self.query = _normal((d_in, spec.heads, *pair, spec.keys), std, generator)
        self.key = _normal((d_in, spec.kv_heads, *pair, spec.keys), std, generator)
        self.value = _normal((d_in, spec.kv_heads, spec.values), std, generator)
        std = shrink * (spec.heads * spec.values) ** -0.5
        self.out = _normal((spec.heads, spec.values, d_out), std, generator)
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
            Axis(
                f"{name}.d_ai",
                "d_ai",
                (Slot(f"{name}.read.gain"),),
                reads,
                Extractor.riders(f"{name}.read"),
                owner=name,
            ),
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
            Axis(
                f"{name}.d_ao",
                "d_ao",
                (Slot(f"{name}.out", 2),),
                (Slot(f"{name}.write.scale"),),
                (Slot(f"{name}.write.sites"),),
                owner=name,
            ),
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
        self.up = _normal((d_in, spec.filters), d_in**-0.5, generator)
        self.gate = _normal((d_in, spec.filters), d_in**-0.5, generator)
        self.down = _normal((spec.filters, d_out), shrink * spec.filters**-0.5, generator)
        self.write = Injector(spec.writes)

    def forward(self, x: Tensor, batch: int) -> Tensor:
        y = self.read(x)
        up, gate = (torch.cat([self.up, self.gate], 1).T @ y).chunk(2)
        return self.down.T @ (up * F.silu(gate))

    def axes(self, name: str) -> list[Axis]:
        return [
            Axis(
                f"{name}.d_mi",
                "d_mi",
                (Slot(f"{name}.read.gain"),),
                (Slot(f"{name}.up"), Slot(f"{name}.gate")),
                Extractor.riders(f"{name}.read"),
                owner=name,
            ),
            Axis(
                f"{name}.d_f",
                "d_f",
                (Slot(f"{name}.up", 1),),
                (Slot(f"{name}.down"),),
                (Slot(f"{name}.gate", 1),),
                owner=name,
            ),
            Axis(
                f"{name}.d_mo",
                "d_mo",
                (Slot(f"{name}.down", 1),),
                (Slot(f"{name}.write.scale"),),
                (Slot(f"{name}.write.sites"),),
                owner=name,
            ),
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


class Classifier(Part):
    """Extractor and one linear map to the outputs."""

    def __init__(
        self, sites: tuple[int, ...], outputs: int, *, tied: bool, generator: torch.Generator
    ):
        super().__init__()
        self.read = Extractor(sites, tied=tied)
        self.out = _normal((len(sites), outputs), len(sites) ** -0.5, generator)

    def forward(self, x: Tensor) -> Tensor:
        """[D, N] -> [N, outputs]."""
        return self.read(x).T @ self.out

    def axes(self, name: str) -> list[Axis]:
        return [
            Axis(
                f"{name}.d_c",
                "d_c",
                (Slot(f"{name}.read.gain"),),
                (Slot(f"{name}.out"),),
                Extractor.riders(f"{name}.read"),
                owner=name,
            )
        ]

    def fixed(self, name: str) -> list[Slot]:
        return [Slot(f"{name}.out", 1)]

    def matrices(self, name: str) -> dict[str, int]:
        return {f"{name}.out": 1}

    def costs(self, name: str) -> list[Cost]:
        axis = (f"{name}.d_c",)
        return [Cost("scale", 1, axis), Cost("matmul", self.out.shape[1], axis)]
