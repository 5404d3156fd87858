"""The parts of an inference model, folded from those of a trained one, and what they are."""

from collections.abc import Iterator, Mapping
from typing import get_args

import torch
from torch import Tensor, nn

from gaugelasso.inference.checks import (
    check_choice,
    check_count,
    check_known,
    check_length,
    check_transformer,
)
from gaugelasso.inference.folding import Folding, Form, StreamOrder
from gaugelasso.inference.layout import inverse, site_order
from gaugelasso.inference.norms import Norm
from gaugelasso.inference.operators import (
    Attention,
    Classifier,
    Embedding,
    GeluMlp,
    HiddenClassifier,
    Mlp,
    Reader,
)
from gaugelasso.inference.tied import TiedClassifier, TiedEmbedding
from gaugelasso.kernels.dispatch import available
from gaugelasso.models import SpecError, Transformer, gelu, heads, hidden_head, operators, tied
from gaugelasso.models.centred_norm import StreamNorm

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Widths on a GPU are multiples of this: what a tensor core multiplies in half precision.
GPU_ALIGN = 16


class FoldedModel(nn.Module):
    """Embedding, operators and classifier; `InferenceModel` computes with them."""

    def __init__(
        self,
        model: Transformer,
        *,
        dtype: torch.dtype = torch.float32,
        forms: Form | Mapping[str, Form] | None = None,
        int8: bool = False,
        reorder: bool = True,
        align: int | None = None,
        stream: StreamOrder = "tokens",
    ):
        super().__init__()
        check_transformer(type(self).__name__, model)
        if dtype not in DTYPES:
            raise SpecError(f"dtype = {dtype}: give {', '.join(map(str, DTYPES))}")
        device = model.sites.device
        align = (GPU_ALIGN if device.type == "cuda" else 1) if align is None else align
        check_count("align", align)
        check_choice("stream", stream, get_args(StreamOrder))
        self.spec = model.spec()
        forms = forms or _usual(device, dtype)
        self.forms = forms if isinstance(forms, Mapping) else _for_all(model, forms)
        order = site_order(self.spec) if reorder else torch.arange(len(self.spec.sites))
        self.folding = folding = Folding(inverse(order), dtype, int8, align)
        self.order: list[int] = order.tolist()
        self.embedding = (TiedEmbedding if self.spec.tied_head else Embedding)(
            model.embedding, folding, stream
        )
        self.operators = nn.ModuleDict()
        for name in model.operators:
            self.operators[name] = fold(model, name, folding, self.forms[name])
        self.norms = nn.ModuleDict()
        for name, norm in model.norms.items():
            assert isinstance(norm, StreamNorm)
            self.norms[name] = Norm(norm.norm, folding, folding.place)
        self.classifier: Reader | TiedClassifier
        if isinstance(model.classifier, tied.TiedClassifier):
            self.classifier = TiedClassifier(model.classifier, model.embedding, folding)
        else:
            self.classifier = fold(model, "classifier", folding, self.forms["classifier"])
        self.eval()
        self.to(device)

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.table.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.table.device

    @property
    def width(self) -> int:
        """The width of the stream."""
        return self.folding.size

    def embed(self, inputs: Tensor, at: Tensor | None = None) -> Tensor:
        """The stream [N, D] of inputs at these positions; SpecError for unknown tokens on a CPU."""
        try:
            return self.embedding(inputs, at)
        except IndexError:  # the look-up itself finds them, so this costs nothing
            check_known(self.spec, inputs)
            raise

    def logits(self, x: Tensor) -> Tensor:
        """The stream [N, D] -> [N, outputs]."""
        if isinstance(self.classifier, TiedClassifier):
            return self.classifier(x, self.embedding.table)
        return self.classifier(x)

    @property
    def weight_bytes(self) -> int:
        """Memory of all tensors."""
        return sum(each.numel() * each.element_size() for each in self.buffers())

    @property
    def cache_bytes_per_token(self) -> int:
        """Memory of the keys and values of one token of one sequence."""
        numbers = sum(groups * (d_k + d_v) for groups, d_k, d_v in self.cache_widths())
        return numbers * self.dtype.itemsize

    @property
    def generates(self) -> bool:
        """Whether this is a causal model over tokens."""
        return self.spec.input_kind == "tokens" and self.spec.causal

    def readers(self) -> dict[str, Reader]:
        """The operators by name, and the classifier unless it is tied: all that have forms."""
        parts = [*self.operators.items(), ("classifier", self.classifier)]
        return {name: part for name, part in parts if isinstance(part, Reader)}

    def check_length(self, length: int) -> None:
        """SpecError if a sequence is longer than the model."""
        check_length(self.spec, length)

    def check_generates(self) -> None:
        """SpecError if this is no causal model over tokens."""
        if not self.generates:
            reads = "whole sequences" if self.spec.input_kind == "tokens" else "patches"
            raise SpecError(
                f"this model reads {reads} and cannot generate tokens; decoding needs a causal "
                "model over tokens"
            )

    def cache_widths(self) -> list[tuple[int, int, int]]:
        """(G, d_k, d_v) of every attention operator. A cache holds no padding."""
        return [(part.groups, part.d_k, part.d_v) for part in self.attentions().values()]

    def attentions(self) -> dict[str, Attention]:
        """The attention operators by name."""
        return {n: part for n, part in self.operators.items() if isinstance(part, Attention)}

    def numbered(self) -> Iterator[tuple[int, nn.Module]]:
        """Operators and normalisers, each with the number of attention operators before it."""
        number = 0
        for part in self._middle():
            yield number, part
            number += isinstance(part, Attention)

    def _middle(self) -> Iterator[nn.Module]:
        if not self.norms:
            yield from self.operators.values()
        for name, norm in self.norms.items():
            if name in self.operators:
                yield self.operators[name]
            yield norm


def fold(model: Transformer, name: str, folding: Folding, form: Form) -> Reader:
    """One operator of a trained model, or its classifier, on the CPU."""
    if name == "classifier":
        last = model.classifier
        assert isinstance(last, heads.Classifier)
        if isinstance(last, hidden_head.HiddenClassifier):
            return HiddenClassifier(last, folding, form)
        return Classifier(last, folding, form)
    part = model.operators[name]
    if isinstance(part, operators.Attention):
        return Attention(part, folding, form, model.initial_spec.length)
    if isinstance(part, operators.SwiGLU):
        return Mlp(part, folding, form)
    assert isinstance(part, gelu.GeluMlp)
    return GeluMlp(part, folding, form)


def _usual(device: torch.device, dtype: torch.dtype) -> Form:
    """What is mostly fastest, where nothing was measured."""
    kernels = device.type == "cuda" and available() and dtype is not torch.float64
    return Form("fused", "fused", "direct") if kernels else Form()


def _for_all(model: Transformer, form: Form) -> dict[str, Form]:
    return dict.fromkeys([*model.operators, "classifier"], form)
