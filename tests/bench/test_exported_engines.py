"""The engines that run exports decode the same tokens as the inference form, in each repetition."""

from typing import Any

import pytest
import torch
from benchmarks import engines, exported_engines
from benchmarks.serving_case import Case, Impossible

from gaugelasso.inference import InferenceModel, Sampling, generate
from gaugelasso.models import Transformer, TransformerSpec

CASE = Case("decode", 2, 20, "cpu", 1)


def uneven(**changes: Any) -> Transformer:
    """One layer whose attention reads fewer sites than there are."""
    sizes = {"width": 8, "layers": 1, "heads": 2, "d_k": 4, "d_v": 4, "d_f": 8, "length": 20}
    torch.manual_seed(0)
    model = Transformer(TransformerSpec.uniform(**{"inputs": 9, "outputs": 9, **sizes, **changes}))
    model.remove_operator("mlp_0")
    return model.eval()


def last_token(model: Transformer) -> list[int]:
    """The last token of a greedy text that goes on after the prompt of the case."""
    prompts = CASE.inputs(9)[:, : CASE.length - CASE.calls + 1].tolist()
    texts = generate(InferenceModel(model), prompts, CASE.calls, sampling=Sampling(0))
    return [text[-1] for text in texts]


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of PyTorch's own exporter
@pytest.mark.parametrize(("engine", "package"), [
    ("onnxruntime", "onnxruntime"), ("hf", "transformers"),
])  # fmt: skip
def test_an_export_decodes_what_the_inference_form_does(engine: str, package: str) -> None:
    pytest.importorskip(package)
    model = uneven()
    action, facts = engines.ENGINES[engine](model, CASE)
    for _ in range(2):
        assert torch.as_tensor(action()).flatten().tolist() == last_token(model)
    assert facts["cache_bytes_per_token"] == InferenceModel(model).cache_bytes_per_token
    assert facts["weight_bytes"] > 0
    with pytest.raises(Impossible):
        engines.ENGINES[engine](uneven(causal=False), CASE)


def test_an_export_that_computes_something_else_is_left_out() -> None:
    logits = torch.randn(2, 9)
    exported_engines._check(logits + 1e-6, logits)
    with pytest.raises(Impossible, match=r"the export is wrong: logits are off by 1"):
        exported_engines._check(logits + 1, logits)
    with pytest.raises(Impossible, match="off by nan"):
        exported_engines._check(logits * torch.nan, logits)
