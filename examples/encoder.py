"""A small vision encoder with LayerNorm, GELU, biases and learned positions, compressed.

It shows what the perceptron of your_model.py does not need: a residual stream that may lose
sites, normalisers over it, an axis without gauge freedom (the GELU is between its sides), biases
on the side that they are added to, and operators that may vanish.

    gaugelasso check examples/encoder.py:build
    python examples/encoder.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gaugelasso import Axis, AxisTable, Compressible, Compressor, CompressorOptions, Cost, Slot
from gaugelasso.models import SiteWriter, SlowNorm, centred, stream_axis

PATCHES, PIXELS, CLASSES = 9, 12, 4


def matrix(*shape: int, inputs: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) * inputs**-0.5)


def writing(*shape: int, inputs: int) -> nn.Parameter:
    """A map into the stream. What it writes has mean zero, so that SlowNorm is LayerNorm."""
    return nn.Parameter(centred(torch.randn(shape)) * inputs**-0.5)


class Attention(nn.Module):
    """Every patch sees all patches. Queries, values and outputs have biases.

    A bias of the keys would add the same to all scores of a query, which the softmax cancels.
    """

    def __init__(self, reads: list[int], writes: list[int], heads: int, d_k: int, d_v: int,
                 scale: float):  # fmt: skip
        super().__init__()
        self.read, self.write = SlowNorm(reads), SiteWriter(writes)
        d = len(reads)
        self.query, self.key = matrix(d, heads, d_k, inputs=d), matrix(d, heads, d_k, inputs=d)
        self.value = matrix(d, heads, d_v, inputs=d)
        self.out = writing(heads, d_v, len(writes), inputs=4 * heads * d_v)
        self.query_bias = nn.Parameter(torch.zeros(heads, d_k))
        self.value_bias = nn.Parameter(torch.zeros(heads, d_v))
        self.out_bias = nn.Parameter(torch.zeros(len(writes)))
        # Of the first width: a head that loses keys must not become sharper or flatter.
        self.softmax_scale = scale

    def forward(self, x: Tensor) -> Tensor:
        y = self.read(x)
        q = torch.einsum("bsd,dhk->bhsk", y, self.query) + self.query_bias[:, None]
        k = torch.einsum("bsd,dhk->bhsk", y, self.key)
        v = torch.einsum("bsd,dhk->bhsk", y, self.value) + self.value_bias[:, None]
        mixed = (q @ k.mT * self.softmax_scale).softmax(-1) @ v
        return self.write(x, torch.einsum("bhsk,hkd->bsd", mixed, self.out) + self.out_bias)

    def axes(self, name: str) -> list[Axis]:
        def slot(leaf: str, dim: int) -> Slot:
            return Slot(f"{name}.{leaf}", dim)

        # With biases, an operator without inputs, keys or values still writes a constant. Only
        # the loss of all outputs silences it.
        maps = tuple(slot(leaf, 0) for leaf in ("query", "key", "value"))
        return [
            self.read.axis(f"{name}.read", maps, owner=name, silences=False),
            Axis(
                f"{name}.keys",
                "keys",
                side_a=(slot("query", 2), slot("query_bias", 1)),
                side_b=(slot("key", 2),),
                owner=name,
                silences=False,
                growth="linear",  # nothing is between queries and keys
            ),
            Axis(
                f"{name}.values",
                "values",
                side_a=(slot("value", 2), slot("value_bias", 1)),
                side_b=(slot("out", 1),),
                owner=name,
                silences=False,
                growth="linear",
            ),
            self.write.axis(f"{name}.write", (slot("out", 2), slot("out_bias", 0)), owner=name),
        ]

    def fixed(self, name: str) -> list[Slot]:
        heads = {"query": 1, "key": 1, "value": 1, "out": 0, "query_bias": 0, "value_bias": 0}
        return [Slot(f"{name}.{leaf}", dim) for leaf, dim in heads.items()]

    def matrices(self, name: str) -> dict[str, int]:
        return {f"{name}.query": 1, f"{name}.key": 1, f"{name}.value": 1, f"{name}.out": 2}

    def costs(self, name: str) -> list[Cost]:
        heads = self.query.shape[1]
        d, keys, values, out = (
            f"{name}.{axis}" for axis in ("read.in", "keys", "values", "write.out")
        )
        return [
            Cost("matmul", 2 * heads, (d, keys)),
            Cost("matmul", heads, (d, values)),
            Cost("scores", heads, (keys,)),
            Cost("mix", heads, (values,)),
            Cost("matmul", heads, (values, out)),
        ]

    def structure(self) -> dict:
        return {
            "reads": self.read.sites.tolist(),
            "writes": self.write.sites.tolist(),
            "heads": self.query.shape[1],
            "d_k": self.query.shape[2],
            "d_v": self.value.shape[2],
            "scale": self.softmax_scale,
        }


class Mlp(nn.Module):
    """down(gelu(up(y) + up_bias)) + down_bias."""

    def __init__(self, reads: list[int], writes: list[int], hidden: int):
        super().__init__()
        self.read, self.write = SlowNorm(reads), SiteWriter(writes)
        self.up = matrix(len(reads), hidden, inputs=len(reads))
        self.up_bias = nn.Parameter(torch.zeros(hidden))
        self.down = writing(hidden, len(writes), inputs=4 * hidden)
        self.down_bias = nn.Parameter(torch.zeros(len(writes)))

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.read(x) @ self.up + self.up_bias)
        return self.write(x, hidden @ self.down + self.down_bias)

    def axes(self, name: str) -> list[Axis]:
        up, up_bias, down, down_bias = (
            f"{name}.{leaf}" for leaf in ("up", "up_bias", "down", "down_bias")
        )
        # gelu(c z) is not c gelu(z): no gauge. gelu(0) = 0, so a unit whose weights and bias are
        # zero writes nothing; the bias must fade with the weights.
        hidden = Axis(
            f"{name}.hidden",
            "hidden",
            side_a=(Slot(up, 1), Slot(up_bias)),
            side_b=(Slot(down),),
            owner=name,
            silences=False,
            gauge=False,
            growth="permutation",  # the GELU is between the sides
        )
        return [
            self.read.axis(f"{name}.read", (Slot(up),), owner=name, silences=False),
            hidden,
            self.write.axis(f"{name}.write", (Slot(down, 1), Slot(down_bias)), owner=name),
        ]

    def fixed(self, name: str) -> list[Slot]:
        return []

    def matrices(self, name: str) -> dict[str, int]:
        return {f"{name}.up": 1, f"{name}.down": 1}

    def costs(self, name: str) -> list[Cost]:
        d, hidden, out = (f"{name}.{axis}" for axis in ("read.in", "hidden", "write.out"))
        return [Cost("matmul", 1, (d, hidden)), Cost("matmul", 1, (hidden, out))]

    def structure(self) -> dict:
        reads, writes = self.read.sites.tolist(), self.write.sites.tolist()
        return {"reads": reads, "writes": writes, "hidden": self.up.shape[1]}


class Encoder(Compressible):
    """Patches -> embedding and positions -> operators -> class of the mean patch."""

    sites: Tensor

    def __init__(self, structure: dict):
        super().__init__()
        embed, classify = structure["embed"], structure["classify"]
        self.register_buffer("sites", torch.tensor(structure["sites"], dtype=torch.long))
        self.embedding = writing(structure["pixels"], len(embed), inputs=structure["pixels"])
        self.positions = writing(structure["patches"], len(embed), inputs=100)
        self.enter = SiteWriter(embed)
        self.operators = nn.ModuleDict(
            {
                name: Attention(**part) if "heads" in part else Mlp(**part)
                for name, part in structure["operators"].items()
            }
        )
        self.leave = SlowNorm(classify)
        self.head = matrix(len(classify), structure["classes"], inputs=len(classify))
        self.head_bias = nn.Parameter(torch.zeros(structure["classes"]))

    @staticmethod
    def uniform(width: int = 16, layers: int = 2, heads: int = 2, d_k: int = 6, hidden: int = 24,
                patches: int = PATCHES, pixels: int = PIXELS, classes: int = CLASSES
                ) -> "Encoder":  # fmt: skip
        sites = list(range(width))
        both = {"reads": sites, "writes": sites}
        operators: dict[str, dict] = {}
        for layer in range(layers):
            head = {"heads": heads, "d_k": d_k, "d_v": d_k, "scale": d_k**-0.5}
            operators[f"attention_{layer}"] = {**both, **head}
            operators[f"mlp_{layer}"] = {**both, "hidden": hidden}
        return Encoder({"sites": sites, "embed": sites, "classify": sites, "operators": operators,
                        "patches": patches, "pixels": pixels, "classes": classes})  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        """[B, patches, pixels] -> logits [B, classes]."""
        rows = images @ self.embedding + self.positions
        x = self.enter(rows.new_zeros(*rows.shape[:2], len(self.sites)), rows)
        for operator in self.operators.values():
            x = operator(x)
        return (self.leave(x) @ self.head + self.head_bias).mean(1)

    def axis_table(self) -> AxisTable:
        (pixels, _), (patches, _), classes = (
            self.embedding.shape, self.positions.shape, self.head.shape[1]
        )  # fmt: skip
        embedded = (Slot("embedding", 1), Slot("positions", 1))
        axes = [self.enter.axis("enter", embedded, owner="enter")]
        fixed = [Slot("embedding", 0), Slot("positions", 0), Slot("head", 1), Slot("head_bias")]
        matrices = {"embedding": 1, "head": 1}
        costs = [Cost("matmul", pixels, ("enter.out",)), Cost("matmul", classes, ("leave.in",))]
        writers, readers, norms = [self.enter.writes("enter", 1)], [], []
        for number, (key, part) in enumerate(self.operators.items(), start=1):
            name, stage = f"operators.{key}", 2 * number  # an operator reads, then writes
            axes += part.axes(name)
            fixed += part.fixed(name)
            matrices |= part.matrices(name)
            costs += part.costs(name)
            readers.append(part.read.reads(f"{name}.read", stage))
            norms.append(part.read.norm(f"{name}.read"))
            writers.append(part.write.writes(f"{name}.write", stage + 1))
        axes.append(self.leave.axis("leave", (Slot("head"),), owner="leave", silences=False))
        readers.append(self.leave.reads("leave", 2 * len(self.operators) + 2))
        norms.append(self.leave.norm("leave"))
        axes.append(stream_axis("stream", Slot("sites"), writers, readers))
        return AxisTable(
            axes=tuple(axes),
            fixed=tuple(fixed),
            matrices=matrices,
            norms=tuple(norms),
            costs=tuple(costs),
            required=frozenset({"enter", "leave"}),
            context=(patches, float(patches)),
        )

    def remove_operator(self, name: str) -> None:
        del self.operators[name.removeprefix("operators.")]

    def structure(self) -> dict:
        return {
            "sites": self.sites.tolist(),
            "embed": self.enter.sites.tolist(),
            "classify": self.leave.sites.tolist(),
            "operators": {name: part.structure() for name, part in self.operators.items()},
            "patches": self.positions.shape[0],
            "pixels": self.embedding.shape[0],
            "classes": self.head.shape[1],
        }

    @classmethod
    def from_structure(cls, structure: dict) -> "Encoder":
        return cls(structure)


# --- what `gaugelasso check examples/encoder.py:build` calls -------------------------------------


def build() -> Encoder:
    torch.manual_seed(0)
    return Encoder.uniform()


def batch(number: int = 64, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Noise with a bright pixel; the class is the quarter of the pixels that it is in."""
    generator = torch.Generator().manual_seed(seed)
    images = 0.3 * torch.randn(number, PATCHES, PIXELS, generator=generator)
    rows = torch.arange(number)
    patches = torch.randint(PATCHES, (number,), generator=generator)
    pixels = torch.randint(PIXELS, (number,), generator=generator)
    images[rows, patches, pixels] += 3.0
    return images, pixels * CLASSES // PIXELS


loss = F.cross_entropy


def main(steps: int = 600) -> Compressor:
    model = build()
    options = CompressorOptions(lr=3e-3, interval=20, loss_smoothing=0.9)
    compressor = Compressor(model, loss_target=0.3, options=options)
    for step in range(steps):
        images, classes = batch(seed=step)
        value = loss(model(images), classes)
        value.backward()
        compressor.step(value)
        if (step + 1) % 100 == 0:
            print(f"step {step + 1}  loss {value.item():.3f}  {compressor.fma:,.0f} FMA per patch")
    print(f"{compressor.fma_initial:,.0f} -> {compressor.fma:,.0f} FMA per patch")
    print({name: width for name, width in compressor.widths.items() if name != "stream"})
    return compressor


if __name__ == "__main__":
    main()
