"""The operators between embedding and classifier: attention and SwiGLU.

Activations are feature-major, and shapes are named as in layers.py.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn

from gaugelasso import kernels
from gaugelasso.axes import Axis, Cost, Norm, Operation, Size, Slot
from gaugelasso.models.layers import Extractor, Injector, Part, normal, size
from gaugelasso.models.spec import AttentionSpec, MlpSpec, OperatorSpec


class Operator(Part):
    """A part that reads the stream and writes to it, and that compression may remove."""

    depth: int  # the number of its layer
    read: Extractor
    write: Injector

    def forward(self, x: Tensor, batch: int) -> Tensor:
        """A stream [D, N] of `batch` sequences -> the stream plus this operator's output."""
        raise NotImplementedError

    def norms(self, name: str) -> list[Norm]:
        return self.read.norms(f"{name}.read")

    def spec(self) -> OperatorSpec:
        """The operator's structure, taken from the shapes of its tensors."""
        raise NotImplementedError


class Attention(Operator):
    """Multi-head attention with grouped keys; with RoPE by pairs if the spec has frequencies.

    With `bias`, queries, keys and values have biases, which lie on the axes of their channels. Keys
    have them with RoPE alone: otherwise such a bias adds the same to all scores of a query, which
    the softmax cancels. With `write_bias`, what is written has biases.
    """

    frequencies: Tensor
    query_bias: nn.Parameter
    key_bias: nn.Parameter
    value_bias: nn.Parameter

    def __init__(
        self,
        spec: AttentionSpec,
        *,
        causal: bool,
        tied: bool,
        shrink: float,
        generator: torch.Generator,
        eps: float = 0.0,
        by_token: bool = False,
        plain: bool = False,
        bias: bool = False,
        write_bias: bool = False,
    ):
        super().__init__()
        d_in, d_out = len(spec.reads), len(spec.writes)
        self.depth = spec.depth
        # Of the initial width: dropping keys must not sharpen the softmax.
        self.softmax_scale = spec.scale
        self.causal = causal
        self.rope = spec.frequencies is not None
        pair = (2,) if self.rope else ()
        self.read = Extractor(spec.reads, tied=tied, eps=eps, by_token=by_token, plain=plain)
        std = d_in**-0.5
        self.query = normal((d_in, spec.heads, *pair, spec.keys), std, generator)
        self.key = normal((d_in, spec.kv_heads, *pair, spec.keys), std, generator)
        self.value = normal((d_in, spec.kv_heads, spec.values), std, generator)
        std = shrink * (spec.heads * spec.values) ** -0.5
        self.out = normal((spec.heads, spec.values, d_out), std, generator)
        self.has_bias = bias
        for leaf in self._biased:
            shape = self.get_parameter(leaf).shape[1:]
            self.register_parameter(f"{leaf}_bias", nn.Parameter(torch.zeros(shape)))
        if spec.frequencies is not None:
            self.register_buffer("frequencies", torch.tensor(spec.frequencies))
        self.write = Injector(spec.writes, write_bias)

    @property
    def _biased(self) -> tuple[str, ...]:
        if not self.has_bias:
            return ()
        return ("query", "key", "value") if self.rope else ("query", "value")

    def biases(self) -> list[Tensor]:
        """Of queries, keys and values, shaped as one row of their maps; for models with `bias`."""
        key = self.key_bias if self.rope else self.key.new_zeros(self.key.shape[1:])
        return [self.query_bias, key, self.value_bias]

    def forward(self, x: Tensor, batch: int) -> Tensor:
        x, q, k, v = self.project_qkv(x, batch)
        return self.project_out(x, kernels.attend(q, k, v, self.softmax_scale, self.causal))

    def project_qkv(
        self, x: Tensor, batch: int, start: int = 0
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The stream, and queries, keys, values [B, heads, S, d] of positions from `start` on."""
        x, normalised = self.read(x)
        heads, groups = self.query.shape[1], self.key.shape[1]
        d_k, d_v = self.query[0, 0].numel(), self.value.shape[2]
        maps = [leaf.flatten(1) for leaf in (self.query, self.key, self.value)]
        rows = kernels.project(normalised, self.read.gain, maps)
        if self.has_bias:
            rows = kernels.add_bias(rows, [each.flatten() for each in self.biases()])
        frequencies = self.frequencies if self.rope else None
        q, k, v = kernels.split_heads(rows, batch, heads, groups, d_k, d_v, frequencies, start)
        return x, q, k, v

    def project_out(self, x: Tensor, mixed: Tensor) -> Tensor:
        """The stream plus the output map of the heads' results."""
        return self.write(x, kernels.merge_heads(mixed, self.out, self.write.scale))

    def axes(self, name: str) -> list[Axis]:
        pairs_dim = 3 if self.rope else 2
        frequencies = (Slot(f"{name}.frequencies"),) if self.rope else ()
        reads = tuple(Slot(f"{name}.{leaf}") for leaf in ("query", "key", "value"))

        def channels(leaf: str, dim: int) -> tuple[Slot, ...]:
            bias = (Slot(f"{name}.{leaf}_bias", dim - 1),) if leaf in self._biased else ()
            return (Slot(f"{name}.{leaf}", dim), *bias)

        silences = self.write.bias is None
        return [
            # With a bias of the values, an operator without inputs still writes a constant.
            self.read.axis(name, "d_ai", reads, silences=silences and not self.has_bias),
            Axis(
                f"{name}.d_k",
                "d_k",
                channels("query", pairs_dim),
                channels("key", pairs_dim),
                frequencies,
                owner=name,
                silences=False,
                growth="rotation" if self.rope else "linear",
            ),
            Axis(
                f"{name}.d_v",
                "d_v",
                channels("value", 2),
                (Slot(f"{name}.out", 1),),
                owner=name,
                silences=silences,
                growth="linear",
            ),
            self.write.axis(name, "d_ao", (Slot(f"{name}.out", 2),)),
        ]

    def fixed(self, name: str) -> list[Slot]:
        dims = [(leaf, 1) for leaf in ("query", "key", "value")]
        if self.rope:
            dims += [("query", 2), ("key", 2)]
        slots = [Slot(f"{name}.{leaf}", dim) for leaf, dim in dims]
        # A bias has the dims of its map, without that of the inputs.
        biased = [(leaf, dim) for leaf, dim in dims if leaf in self._biased]
        slots += [Slot(f"{name}.{leaf}_bias", dim - 1) for leaf, dim in biased]
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
        if self.causal:
            costs += [Cost("cache", groups, (d_k,), unit=unit), Cost("cache", groups, (d_v,))]
        return [*costs, Cost("rotation", heads, (d_k,))] if self.rope else costs

    def operations(self, name: str) -> list[Operation]:
        heads, groups = self.query.shape[1], self.key.shape[1]
        unit = 2 if self.rope else 1
        d_ai, d_k, d_v, d_ao = (f"{name}.{kind}" for kind in ("d_ai", "d_k", "d_v", "d_ao"))
        columns = Size(((d_k, (heads + groups) * unit), (d_v, groups)))
        fixed = (heads, groups, int(self.rope), int(self.causal))
        return [
            Operation("read", (size(d_ai), columns)),
            Operation("attention", (size(d_k, unit), size(d_v)), fixed),
            Operation("write", (size(d_v, heads), size(d_ao))),
        ]

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


class Mlp(Operator):
    """Maps that read, a nonlinearity for each filter, and a map that writes."""

    reading: ClassVar[tuple[str, int]]  # the name of its first operation, and the number of maps
    up: nn.Parameter

    def costs(self, name: str) -> list[Cost]:
        d_mi, d_f, d_mo = self._widths(name)
        return [
            Cost("scale", 1, (d_mi,)),
            Cost("matmul", self.reading[1], (d_mi, d_f)),
            Cost("matmul", 1, (d_f, d_mo)),
            Cost("scale", 1, (d_mo,)),
        ]

    def operations(self, name: str) -> list[Operation]:
        d_mi, d_f, d_mo = self._widths(name)
        return [
            Operation(self.reading[0], (size(d_mi), size(d_f))),
            Operation("write", (size(d_f), size(d_mo))),
        ]

    def spec(self) -> MlpSpec:
        reads, writes = (tuple(t.sites.tolist()) for t in (self.read, self.write))
        return MlpSpec(self.depth, reads, writes, self.up.shape[1])

    @staticmethod
    def _widths(name: str) -> tuple[str, str, str]:
        return f"{name}.d_mi", f"{name}.d_f", f"{name}.d_mo"


class SwiGLU(Mlp):
    """down(up(y) * silu(gate(y))); with `write_bias`, what is written has biases."""

    reading = "gated read", 2

    def __init__(
        self,
        spec: MlpSpec,
        *,
        tied: bool,
        shrink: float,
        generator: torch.Generator,
        eps: float = 0.0,
        by_token: bool = False,
        plain: bool = False,
        write_bias: bool = False,
    ):
        super().__init__()
        d_in, d_out = len(spec.reads), len(spec.writes)
        self.depth = spec.depth
        self.read = Extractor(spec.reads, tied=tied, eps=eps, by_token=by_token, plain=plain)
        self.up = normal((d_in, spec.filters), d_in**-0.5, generator)
        self.gate = normal((d_in, spec.filters), d_in**-0.5, generator)
        self.down = normal((spec.filters, d_out), shrink * spec.filters**-0.5, generator)
        self.write = Injector(spec.writes, write_bias)

    def forward(self, x: Tensor, batch: int) -> Tensor:
        x, normalised = self.read(x)
        both = kernels.project(normalised, self.read.gain, [self.up, self.gate])
        return self.write(x, kernels.deliver(kernels.swiglu(both), self.down, self.write.scale))

    def axes(self, name: str) -> list[Axis]:
        silences = self.write.bias is None
        maps = Slot(f"{name}.up"), Slot(f"{name}.gate")
        return [
            self.read.axis(name, "d_mi", maps, silences=silences),
            Axis(
                f"{name}.d_f",
                "d_f",
                (Slot(f"{name}.up", 1),),
                (Slot(f"{name}.down"),),
                (Slot(f"{name}.gate", 1),),
                owner=name,
                silences=silences,
                growth="permutation",
            ),
            self.write.axis(name, "d_mo", (Slot(f"{name}.down", 1),)),
        ]

    def matrices(self, name: str) -> dict[str, int]:
        return {f"{name}.up": 1, f"{name}.gate": 1, f"{name}.down": 1}
