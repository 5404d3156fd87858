"""Encoders with a LayerNorm after each addition to the stream (post-norm), biases and GELU.

What BERT and its relatives share; a family has its names of tensors and its settings. Each
LayerNorm is a `CentredNorm` in place over all sites, so nothing has to be centred. Type 0 of the
token types is added to the positions: the model reads sequences of one segment. The bias of the
keys has no effect and has no place: it adds the same to all scores of a query, which the softmax
cancels. A model without a head has its last hidden state as outputs, by a head that is the
identity.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gaugelasso.errors import UserError
from gaugelasso.importing.layer_norm import Trunk
from gaugelasso.importing.pretrained import unfilled
from gaugelasso.importing.source import PLACES, Source
from gaugelasso.importing.tensors import check_tensors, check_tied
from gaugelasso.models import Transformer, TransformerSpec
from gaugelasso.models.centred_norm import CentredNorm, StreamNorm
from gaugelasso.models.gelu import GeluMlp
from gaugelasso.models.hidden_head import HiddenClassifier
from gaugelasso.models.operators import Attention

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Names:
    """What a family calls its tensors, without `.weight` and `.bias`.

    Those of a layer come after `layer`, which has a place for its number.
    """

    layer: str
    query: str
    key: str
    value: str
    mixed: str
    mixed_norm: str
    up: str
    down: str
    layer_norm: str
    head: str
    head_norm: str
    decoder: str
    # The bias of the outputs, where the map to them is tied.
    decoder_bias: str
    table: str = "embeddings.word_embeddings"
    positions: str = "embeddings.position_embeddings"
    types: str = "embeddings.token_type_embeddings"
    norm: str = "embeddings.LayerNorm"

    def within(self, depth: int, name: str) -> str:
        return f"{self.layer.format(depth)}.{name}"

    def tied(self) -> dict[str, str]:
        """What a tied head may have a second time -> what it must equal."""
        twins = {f"{self.decoder}.weight": f"{self.table}.weight"}
        if self.decoder_bias != f"{self.decoder}.bias":
            twins[f"{self.decoder}.bias"] = self.decoder_bias
        return twins


@dataclass(frozen=True, kw_only=True)
class Sizes(Trunk):
    """What settings say of a model; `masked_lm` where it has the head of one."""

    vocabulary: int
    length: int
    types: int
    masked_lm: bool
    # Whether its last map is the table of tokens.
    tied: bool
    # Rows of the positions before that of the first token.
    skipped: int = 0

    def ends(self, names: Names) -> Shapes:
        """The tensors of the embedding."""
        rows = {names.table: self.vocabulary, names.positions: self.length + self.skipped}
        rows |= {names.types: self.types} if self.types else {}
        shapes: Shapes = {f"{name}.weight": (size, self.width) for name, size in rows.items()}
        return {**shapes, **self._norm(names.norm)}

    def layer(self, names: Names) -> Shapes:
        """The tensors of a layer: outputs, inputs."""
        d, f = self.width, self.d_f
        maps: Shapes = dict.fromkeys((names.query, names.key, names.value, names.mixed), (d, d))
        maps |= {names.up: (f, d), names.down: (d, f)}
        return {
            **_with_biases(maps),
            **self._norm(names.mixed_norm),
            **self._norm(names.layer_norm),
        }

    def head(self, names: Names) -> Shapes:
        """The tensors of the head of a masked language model."""
        shapes = _with_biases({names.head: (self.width, self.width)})
        shapes |= self._norm(names.head_norm)
        if self.tied:
            return {**shapes, names.decoder_bias: (self.vocabulary,)}
        return {**shapes, **_with_biases({names.decoder: (self.vocabulary, self.width)})}

    def _norm(self, name: str) -> Shapes:
        return {f"{name}.weight": (self.width,), f"{name}.bias": (self.width,)}

    def spec(self) -> TransformerSpec:
        return self.biased(
            self.length,
            self.vocabulary,
            self.vocabulary if self.masked_lm else self.width,
            causal=False,
            post_norm=True,
            head_bias=self.masked_lm,
            head_hidden=self.width if self.masked_lm else 0,
        )


def build(source: Source, sizes: Sizes, names: Names, others: Collection[str] = ()) -> Transformer:
    """The model; `others` are tensors of heads that it does not depend on."""
    # The shapes first: they bound what is built by what the file really holds.
    _check_tensors(source, sizes, names, others)
    model = unfilled(source, sizes.spec)
    _fill_(model, source, sizes, names)
    return model


def _with_biases(maps: Shapes) -> Shapes:
    weights = {f"{name}.weight": shape for name, shape in maps.items()}
    return {**weights, **{f"{name}.bias": shape[:1] for name, shape in maps.items()}}


def _check_tensors(source: Source, sizes: Sizes, names: Names, others: Collection[str]) -> None:
    """UserError unless the source has just the tensors that the sizes call for."""
    # An untied head has a bias of its own, and the other one has no effect.
    known = [*names.tied(), names.decoder_bias, *others] if sizes.masked_lm else []
    places = [name for name in source.shapes if name.endswith(PLACES)]

    def expected() -> Iterator[tuple[str, tuple[int, ...]]]:
        yield from sizes.ends(names).items()
        if sizes.masked_lm:
            yield from sizes.head(names).items()
        layer = sizes.layer(names)
        for depth in range(sizes.layers):
            yield from ((names.within(depth, name), shape) for name, shape in layer.items())

    hint = (
        f"; the pooler of a {source.architecture} cannot be imported: save the model without it "
        "(add_pooling_layer=False)"
    )
    pooled = any(name.startswith("pooler.") for name in source.shapes)
    check_tensors(source, expected(), [*known, *places], hint if pooled else "")
    for name in places:
        rows = torch.arange(sizes.length + sizes.skipped)
        if not torch.equal(source.read(name).flatten(), rows):
            raise UserError(f"{str(source.path)!r}: tensor {name[:100]!r} does not count positions")
    if sizes.masked_lm and sizes.tied:
        for name, twin in names.tied().items():
            check_tied(source, name, twin)


@torch.no_grad()
def _fill_(model: Transformer, source: Source, sizes: Sizes, names: Names) -> None:
    def fill_(leaf: Tensor, name: str) -> None:
        """A map [outputs, inputs] as the transpose in this shape; others as they are."""
        values = source.read(name)
        leaf.copy_((values.T if values.ndim > 1 else values).reshape(leaf.shape))

    def norm_(norm: CentredNorm, name: str) -> None:
        fill_(norm.gain, f"{name}.weight")
        fill_(norm.bias, f"{name}.bias")

    def stream_norm_(place: str, name: str) -> None:
        part = model.norms[place]
        assert isinstance(part, StreamNorm)
        norm_(part.norm, name)

    model.embedding.table.copy_(source.read(f"{names.table}.weight"))
    positions = source.read(f"{names.positions}.weight").double()[sizes.skipped :]
    if sizes.types:
        positions = positions + source.read(f"{names.types}.weight").double()[0]
    assert model.embedding.positions is not None
    model.embedding.positions.copy_(positions)
    stream_norm_("embedding", names.norm)
    for depth in range(model.initial_spec.layers):
        attention, mlp = (model.operators[f"{kind}_{depth}"] for kind in ("attention", "mlp"))
        assert isinstance(attention, Attention)
        assert isinstance(mlp, GeluMlp)
        assert attention.write.bias is not None
        assert mlp.write.bias is not None
        for what in ("query", "key", "value"):
            name = names.within(depth, getattr(names, what))
            fill_(getattr(attention, what), f"{name}.weight")
            if what != "key":
                fill_(getattr(attention, f"{what}_bias"), f"{name}.bias")
        mixed, up, down = (names.within(depth, n) for n in (names.mixed, names.up, names.down))
        fill_(attention.out, f"{mixed}.weight")
        fill_(attention.write.bias, f"{mixed}.bias")
        stream_norm_(f"attention_{depth}", names.within(depth, names.mixed_norm))
        fill_(mlp.up, f"{up}.weight")
        fill_(mlp.up_bias, f"{up}.bias")
        fill_(mlp.down, f"{down}.weight")
        fill_(mlp.write.bias, f"{down}.bias")
        stream_norm_(f"mlp_{depth}", names.within(depth, names.layer_norm))
    last = model.classifier
    if not isinstance(last, HiddenClassifier):
        last.out.copy_(torch.eye(len(last.out)))
        return
    fill_(last.up, f"{names.head}.weight")
    fill_(last.up_bias, f"{names.head}.bias")
    norm_(last.norm, names.head_norm)
    fill_(last.out, f"{names.table if sizes.tied else names.decoder}.weight")
    assert last.bias is not None
    fill_(last.bias, names.decoder_bias if sizes.tied else f"{names.decoder}.bias")
