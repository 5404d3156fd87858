"""Vision transformers (ViT): LayerNorm, biases, GELU, a class token and patches of an image.

`layer_norm` says how a LayerNorm is represented. The model reads patches [B, 1 + P, n], where the
first one is zero: its position holds the class token (`to_patches`). The bias of the patches is
part of the other positions. The bias of the keys has no effect and has no place.

Outputs are those of every position. The logits of a ViTForImageClassification are those of the
first one. A ViTModel has its last hidden state as outputs, by a head that is the identity.

Refused by name: the pooler of a ViTModel, images that are not square, activations other than GELU.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gaugelasso.importing.layer_norm import (
    LayerNorm,
    Maps,
    Trunk,
    activation_of,
    fill_attention_,
    fill_mlp_,
    width_and_heads,
    write_centred_,
)
from gaugelasso.importing.pretrained import unfilled
from gaugelasso.importing.source import Settings, Source
from gaugelasso.importing.tensors import check_tensors
from gaugelasso.models import Transformer, TransformerSpec, centred
from gaugelasso.models.gelu import GeluMlp
from gaugelasso.models.operators import Attention

CLASSIFIER = "ViTForImageClassification"
Shapes = dict[str, tuple[int, ...]]


def to_patches(images: Tensor, size: int) -> Tensor:
    """Images [B, channels, height, width] -> squares of `size` pixels, as the model reads them."""
    patches = F.unfold(images, size, stride=size).mT
    return F.pad(patches, (0, 0, 1, 0))


@dataclass(frozen=True, kw_only=True)
class Sizes(Trunk):
    """What settings say of a model; `classes` is None for one without a classifier."""

    image: int
    patch: int
    channels: int
    qkv_bias: bool
    classes: int | None

    @property
    def length(self) -> int:
        return 1 + (self.image // self.patch) ** 2

    def ends(self) -> Shapes:
        """The tensors beside the layers, but the classifier."""
        d, patch = self.width, (self.channels, self.patch, self.patch)
        return {
            "embeddings.cls_token": (1, 1, d),
            "embeddings.position_embeddings": (1, self.length, d),
            "embeddings.patch_embeddings.projection.weight": (d, *patch),
            "embeddings.patch_embeddings.projection.bias": (d,),
            "layernorm.weight": (d,),
            "layernorm.bias": (d,),
        }

    def layer(self) -> Shapes:
        """The tensors of a layer: outputs, inputs."""
        d, f = self.width, self.d_f
        joined = {f"attention.attention.{what}": (d, d) for what in ("query", "key", "value")}
        others = {"attention.output.dense": (d, d), "intermediate.dense": (f, d)}
        others |= {"output.dense": (d, f)}
        shapes: Shapes = {f"{name}.weight": shape for name, shape in (joined | others).items()}
        biased = joined | others if self.qkv_bias else others
        shapes |= {f"{name}.bias": shape[:1] for name, shape in biased.items()}
        for norm in ("layernorm_before", "layernorm_after"):
            shapes |= {f"{norm}.weight": (d,), f"{norm}.bias": (d,)}
        return shapes

    def spec(self) -> TransformerSpec:
        inputs, outputs = self.channels * self.patch**2, self.classes or self.width
        return self.biased(self.length, inputs, outputs, input_kind="patches", causal=False)


def from_folder(source: Source) -> Transformer:
    """The model of a Hugging Face folder with the architecture ViTModel or the classifier."""
    classes = None
    if source.architecture == CLASSIFIER:
        # The settings have names of classes, and not their number.
        classes = source.shapes.get("classifier.bias", (1,))[0]
    sizes = _sizes(source.settings, classes)
    # The shapes first: they bound what is built by what the file really holds.
    prefix = "" if classes is None else "vit."
    _check_tensors(source, sizes, prefix)
    model = unfilled(source, sizes.spec)
    _fill_(model, source, sizes, prefix)
    return model


def _sizes(config: Settings, classes: int | None) -> Sizes:
    width, heads = width_and_heads(config, "hidden_size", "num_attention_heads")
    image, patch = config.whole("image_size"), config.whole("patch_size")
    if image % patch:
        raise config.error("patch_size", f"must divide image_size = {image}")
    return Sizes(
        width=width,
        layers=config.whole("num_hidden_layers"),
        heads=heads,
        d_f=config.whole("intermediate_size"),
        image=image,
        patch=patch,
        channels=config.whole("num_channels", 3),
        eps=config.number("layer_norm_eps", 1e-12),
        mlp=activation_of(config, "hidden_act", "gelu"),
        qkv_bias=config.switch("qkv_bias", True),
        classes=classes,
    )


def _check_tensors(source: Source, sizes: Sizes, prefix: str) -> None:
    """UserError unless the source has just the tensors that the sizes call for."""

    def expected() -> Iterator[tuple[str, tuple[int, ...]]]:
        yield from ((prefix + name, shape) for name, shape in sizes.ends().items())
        if sizes.classes is not None:
            yield "classifier.weight", (sizes.classes, sizes.width)
            yield "classifier.bias", (sizes.classes,)
        layer = sizes.layer()
        for depth in range(sizes.layers):
            inner = f"{prefix}encoder.layer.{depth}."
            yield from ((inner + name, shape) for name, shape in layer.items())

    hint = "; save a ViTModel without its pooler (add_pooling_layer=False)"
    pooled = any(name.startswith("pooler.") for name in source.shapes)
    check_tensors(source, expected(), (), hint if pooled else "")


@torch.no_grad()
def _fill_(model: Transformer, source: Source, sizes: Sizes, prefix: str) -> None:
    def read(name: str) -> Tensor:
        return source.read(prefix + name).double()

    def norm(name: str) -> LayerNorm:
        return LayerNorm(read(f"{name}.weight"), read(f"{name}.bias"))

    def maps(name: str, bias: bool = True) -> Maps:
        return read(f"{name}.weight").T, read(f"{name}.bias") if bias else None

    patches = "embeddings.patch_embeddings.projection"
    write_centred_(model.embedding.table, read(f"{patches}.weight").flatten(1).T)
    positions = read("embeddings.position_embeddings")[0]
    positions[0] += read("embeddings.cls_token")[0, 0]
    positions[1:] += read(f"{patches}.bias")
    assert model.embedding.positions is not None
    model.embedding.positions.copy_(centred(positions))
    for depth in range(sizes.layers):
        attention, mlp = (model.operators[f"{kind}_{depth}"] for kind in ("attention", "mlp"))
        assert isinstance(attention, Attention)
        assert isinstance(mlp, GeluMlp)
        layer = f"encoder.layer.{depth}"
        parts = [
            maps(f"{layer}.attention.attention.{what}", sizes.qkv_bias)
            for what in ("query", "key", "value")
        ]
        biases = [bias for _, bias in parts if bias is not None]
        joined = torch.cat([each for each, _ in parts], 1), torch.cat(biases) if biases else None
        out = maps(f"{layer}.attention.output.dense")
        fill_attention_(attention, norm(f"{layer}.layernorm_before"), joined, out)
        up, down = maps(f"{layer}.intermediate.dense"), maps(f"{layer}.output.dense")
        fill_mlp_(mlp, norm(f"{layer}.layernorm_after"), up, down)
    last = norm("layernorm")
    head, bias = torch.eye(sizes.width, dtype=torch.float64), None
    if sizes.classes is not None:
        head = source.read("classifier.weight").double().T
        bias = source.read("classifier.bias").double()
    model.classifier.read.gain.copy_(last.gain)
    model.classifier.out.copy_(head)
    assert model.classifier.bias is not None
    model.classifier.bias.copy_(last.bias_after(head, bias))
