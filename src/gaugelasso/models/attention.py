"""Attention, with or without RoPE, biases, norms of queries and keys, and a sliding window.

Activations are feature-major, and shapes are named as in layers.py.
"""

import torch
from torch import Tensor, nn

from gaugelasso import kernels
from gaugelasso.axes import Axis, Cost, Growth, Norm, Operation, Size, Slot
from gaugelasso.models.head_norm import HeadNorm
from gaugelasso.models.layers import Operator, OperatorOptions, normal, size
from gaugelasso.models.operator_spec import AttentionSpec


class Attention(Operator):
    """Multi-head attention with grouped keys; with RoPE by pairs if the spec has frequencies.

    With `bias`, queries, keys and values have biases, which lie on the axes of their channels. Keys
    without RoPE and norm have none: such a bias adds the same to all scores of a query, which the
    softmax cancels.

    With `qk_norm`, queries and keys are normalised in each head (`HeadNorm`). Where the spec has a
    `window`, a query sees that many keys at most, up to its own.
    """

    frequencies: Tensor
    query_bias: nn.Parameter
    key_bias: nn.Parameter
    value_bias: nn.Parameter

    def __init__(
        self,
        spec: AttentionSpec,
        options: OperatorOptions,
        *,
        causal: bool,
        bias: bool = False,
        qk_norm: bool = False,
    ):
        super().__init__()
        generator = options.generator
        d_in, d_out = len(spec.reads), len(spec.writes)
        self.depth, self.window = spec.depth, spec.window
        # Of the initial width: dropping keys must not sharpen the softmax.
        self.softmax_scale = spec.scale
        self.causal = causal
        self.rope = spec.frequencies is not None
        pair = (2,) if self.rope else ()
        self.read = options.read(spec.reads)
        std = d_in**-0.5
        self.query = normal((d_in, spec.heads, *pair, spec.keys), std, generator)
        self.key = normal((d_in, spec.kv_heads, *pair, spec.keys), std, generator)
        self.value = normal((d_in, spec.kv_heads, spec.values), std, generator)
        std = options.shrink * (spec.heads * spec.values) ** -0.5
        self.out = normal((spec.heads, spec.values, d_out), std, generator)
        self.query_norm: HeadNorm | None = None
        self.key_norm: HeadNorm | None = None
        if qk_norm:
            self.query_norm, self.key_norm = (
                HeadNorm((*pair, spec.keys), eps=options.eps, by_token=options.by_token)
                for _ in range(2)
            )
        self.has_bias = bias
        for leaf in self._biased:
            shape = self.get_parameter(leaf).shape[1:]
            self.register_parameter(f"{leaf}_bias", nn.Parameter(torch.zeros(shape)))
        if spec.frequencies is not None:
            self.register_buffer("frequencies", torch.tensor(spec.frequencies))
        self.write = options.write(spec.writes)

    @property
    def _biased(self) -> tuple[str, ...]:
        if not self.has_bias:
            return ()
        return ("query", "key", "value") if self._keys_biased else ("query", "value")

    @property
    def _keys_biased(self) -> bool:
        return self.rope or self.key_norm is not None

    def head_norms(self) -> dict[str, HeadNorm]:
        """Those of queries and keys by name; none without `qk_norm`."""
        found = {"query_norm": self.query_norm, "key_norm": self.key_norm}
        return {name: norm for name, norm in found.items() if norm is not None}

    def biases(self) -> list[Tensor]:
        """Of queries, keys and values, shaped as one row of their maps; for models with `bias`."""
        key = self.key_bias if self._keys_biased else self.key.new_zeros(self.key.shape[1:])
        return [self.query_bias, key, self.value_bias]

    def forward(self, x: Tensor, batch: int, lengths: Tensor | None = None) -> Tensor:
        x, q, k, v = self.project_qkv(x, batch)
        mixed = kernels.attend(q, k, v, self.softmax_scale, self.causal, self.window, lengths)
        return self.project_out(x, mixed)

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
        if self.query_norm is not None and self.key_norm is not None:
            q, k, v = kernels.split_rows(rows, [each.shape[1] for each in maps])
            rows = kernels.join_rows([self.query_norm(q), self.key_norm(k), v])
        frequencies = self.frequencies if self.rope else None
        q, k, v = kernels.split_heads(rows, batch, heads, groups, d_k, d_v, frequencies, start)
        return x, q, k, v

    def project_out(self, x: Tensor, mixed: Tensor) -> Tensor:
        """The stream plus the output map of the heads' results."""
        return self.write(x, kernels.merge_heads(mixed, self.out, self.write.scale))

    def axes(self, name: str) -> list[Axis]:
        pairs_dim = 3 if self.rope else 2
        reads = tuple(Slot(f"{name}.{leaf}") for leaf in ("query", "key", "value"))

        def channels(leaf: str, dim: int) -> tuple[Slot, ...]:
            bias = (Slot(f"{name}.{leaf}_bias", dim - 1),) if leaf in self._biased else ()
            return (Slot(f"{name}.{leaf}", dim), *bias)

        silences = self.write.bias is None
        return [
            # With a bias of the values, an operator without inputs still writes a constant.
            self.read.axis(name, "d_ai", reads, silences=silences and not self.has_bias),
            self._key_axis(name, channels("query", pairs_dim), channels("key", pairs_dim)),
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

    def _key_axis(self, name: str, query: tuple[Slot, ...], key: tuple[Slot, ...]) -> Axis:
        """The key indices: the maps of queries and keys, or the gains of their norms.

        A norm stands between its map and the scores, so that the maps have no gauge: they go with
        the gains. It sums squares, so the indices of a norm can be reordered, not mixed.
        """
        riders: tuple[Slot, ...] = (Slot(f"{name}.frequencies"),) if self.rope else ()
        side_a, side_b = query, key
        growth: Growth = "rotation" if self.rope else "linear"
        if norms := self.head_norms():
            side_a, side_b = ((Slot(f"{name}.{norm}.gain"),) for norm in norms)
            riders += query + key
            for leaf, norm in norms.items():
                riders += norm.riders(f"{name}.{leaf}")
            growth = "permutation"
        kind, sides = "d_k", (side_a, side_b, riders)
        return Axis(f"{name}.{kind}", kind, *sides, owner=name, silences=False, growth=growth)

    def norms(self, name: str) -> list[Norm]:
        inner = self.head_norms().items()
        return [*super().norms(name), *(norm.norm(f"{name}.{leaf}") for leaf, norm in inner)]

    def fixed(self, name: str) -> list[Slot]:
        dims = [(leaf, 1) for leaf in ("query", "key", "value")]
        if self.rope:
            dims += [("query", 2), ("key", 2)]
        slots = [Slot(f"{name}.{leaf}", dim) for leaf, dim in dims]
        # A bias has the dims of its map, without that of the inputs.
        biased = [(leaf, dim) for leaf, dim in dims if leaf in self._biased]
        slots += [Slot(f"{name}.{leaf}_bias", dim - 1) for leaf, dim in biased]
        for leaf, norm in self.head_norms().items():
            slots += norm.fixed(f"{name}.{leaf}")
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
            Cost("scores", heads, (d_k,), unit=unit, window=self.window),
            Cost("mix", heads, (d_v,), window=self.window),
            Cost("matmul", heads, (d_v, d_ao)),
            Cost("scale", 1, (d_ao,)),
        ]
        if self.head_norms():
            costs.append(Cost("scale", (heads + groups) * unit, (d_k,)))
        if self.causal:
            costs += [Cost("cache", groups, (d_k,), unit=unit), Cost("cache", groups, (d_v,))]
        return [*costs, Cost("rotation", heads, (d_k,))] if self.rope else costs

    def operations(self, name: str) -> list[Operation]:
        heads, groups = self.query.shape[1], self.key.shape[1]
        unit = 2 if self.rope else 1
        d_ai, d_k, d_v, d_ao = (f"{name}.{kind}" for kind in ("d_ai", "d_k", "d_v", "d_ao"))
        columns = Size(((d_k, (heads + groups) * unit), (d_v, groups)))
        fixed: tuple[int, ...] = (heads, groups, int(self.rope), int(self.causal))
        if self.window is not None:
            fixed += (self.window,)
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
            window=self.window,
        )
