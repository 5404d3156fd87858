"""A small transformer in float64, and its loss on batches of the retrieval task."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from gaugelasso.models import Transformer, TransformerSpec
from gaugelasso.tasks import Draw, Retrieval

TASK = Retrieval(vocabulary=16, modulus=3, length=12)


def model(**settings: Any) -> Transformer:
    sizes = {"width": 12, "layers": 2, "heads": 2, "d_k": 6, "d_v": 5, "d_f": 16}
    ends = {"length": TASK.length, "inputs": TASK.inputs, "outputs": TASK.outputs}
    return Transformer(TransformerSpec.uniform(**(sizes | ends | settings)), seed=1).double()


def loss(network: Transformer, step: int = 0) -> Tensor:
    inputs, targets = TASK.batch(8, Draw(1, step, 0), "cpu")
    return F.cross_entropy(network(inputs).flatten(0, 1), targets.flatten(), ignore_index=-100)
