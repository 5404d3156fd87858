"""The structures that inference is tested on: every row of the contract suite, and two more."""

from gaugelasso.models import Transformer
from tests.contract.models import TRANSFORMERS, Case, made, make, transformer

_MORE = [
    transformer("no_rope", rope=False, positions=True),
    transformer("tied", norm="tied", heads=4, kv_heads=1),
]
CASES = TRANSFORMERS + [Case(row, dropped, seed=0) for row in _MORE for dropped in (False, True)]


def is_generative(case: Case) -> bool:
    spec = made(case).initial_spec
    return spec.causal and spec.input_kind == "tokens"


GENERATIVE = [case for case in CASES if is_generative(case)]


def without_operators(case: Case, *names: str) -> Transformer:
    """The case's model with some operators removed."""
    model: Transformer = make(case)
    for name in names:
        model.remove_operator(name)
    return model
