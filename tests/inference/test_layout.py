"""The order of the sites: fewer runs, and nothing else changes."""

import json
from pathlib import Path

import pytest
import torch

from gaugelasso.inference import InferenceModel
from gaugelasso.inference.layout import count_runs, inverse, reaches, site_order, total_runs
from gaugelasso.inference.stream import Read
from gaugelasso.models import TransformerSpec
from tests.contract.models import Case, make
from tests.inference.cases import CASES

RESULTS = Path(__file__).parents[2] / "results" / "charlm" / "main.json"


@pytest.mark.parametrize(
    ("sites", "runs"), [((), 0), ((3,), 1), ((0, 1, 2), 1), ((2, 0, 1, 5), 2), ((1, 3, 5), 3)]
)
def test_runs_are_counted(sites: tuple[int, ...], runs: int) -> None:
    assert count_runs(sites) == runs


@pytest.mark.parametrize("case", [case for case in CASES if case.dropped], ids=str)
def test_an_order_is_a_permutation_without_more_runs(case: Case) -> None:
    spec = make(case).spec()
    order = site_order(spec)
    given = torch.arange(len(order))
    assert torch.equal(order.sort().values, given)
    assert torch.equal(order[inverse(order)], given)
    assert total_runs(spec, order) <= total_runs(spec, given)


def test_a_compressed_language_model_has_less_than_half_the_runs() -> None:
    spec = TransformerSpec.from_dict(json.loads(RESULTS.read_text())["runs"][0]["structure"])
    given = torch.arange(len(spec.sites))
    assert total_runs(spec, given) == sum(map(count_runs, reaches(spec)))
    assert total_runs(spec, site_order(spec)) < total_runs(spec, given) / 2


@pytest.mark.parametrize("case", [case for case in CASES if case.dropped], ids=str)
@torch.inference_mode()
def test_an_order_changes_no_output(case: Case) -> None:
    model = make(case)
    inputs = case.row.inputs(model, torch.Generator().manual_seed(1))
    one, other = (
        InferenceModel(model, dtype=torch.float64, reorder=reorder)(inputs)
        for reorder in (True, False)
    )
    assert torch.allclose(one, other, atol=1e-12)


def test_a_read_with_a_gap_is_not_taken_for_adjacent_sites() -> None:
    """Nine sites with a gap, padded to 16, span 16 sites: kernels must look each one up."""
    gapped = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 15])
    for sites, first in ((gapped, None), (torch.arange(16, 32), 16), (torch.arange(9), None)):
        weight, maps = torch.ones(len(sites)), torch.ones(len(sites), 4)
        assert Read(sites, weight, maps, "fused", align=16).first == first
    assert Read(gapped, torch.ones(9), torch.ones(9, 4), "window", align=16).first == 0
