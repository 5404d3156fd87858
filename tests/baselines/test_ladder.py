"""The ladder of uniform models, and the search for the smallest that reaches a loss."""

import math
from itertools import pairwise
from pathlib import Path

import pytest

from gaugelasso.baselines.ladder import Scale, ladder, next_rungs, smallest_reaching
from gaugelasso.bench.measure import work_per_token
from gaugelasso.config import Config
from gaugelasso.models import Transformer
from tests.tiny import tiny


def config(folder: Path, **model: int) -> Config:
    return tiny(folder, **{f"model__{key}": value for key, value in model.items()})


@pytest.mark.parametrize("scale", ["dims", "heads"])
def test_a_ladder_ends_with_the_full_model_and_grows_in_small_steps(
    tmp_path: Path, scale: Scale
) -> None:
    settings = config(tmp_path, width=40, heads=4, d_k=8, d_v=8, d_f=80)
    rungs = ladder(settings, scale)
    widths = [model.width for model in rungs]
    assert rungs[-1] == settings.model
    assert widths[:4] == [1, 2, 3, 4]
    assert all(1 <= above - below <= 2 for below, above in pairwise(widths))
    work = [work_per_token(Transformer(model.spec(settings.task))) for model in rungs]
    assert work == sorted(set(work))


def test_the_two_ways_to_narrow(tmp_path: Path) -> None:
    settings = config(tmp_path, width=32, heads=4, d_k=8, d_v=8, d_f=64)
    (dims,) = (model for model in ladder(settings, "dims") if model.width == 16)
    (heads,) = (model for model in ladder(settings, "heads") if model.width == 16)
    assert (dims.heads, dims.d_k, dims.d_v, dims.d_f) == (4, 4, 4, 32)
    assert (heads.heads, heads.d_k, heads.d_v, heads.d_f) == (2, 8, 8, 32)
    assert dims.layers == heads.layers == settings.model.layers
    # RoPE rotates pairs of keys.
    assert all(model.d_k % 2 == 0 for model in ladder(settings, "dims"))


def test_a_width_that_cannot_be_built_is_left_out(tmp_path: Path) -> None:
    """At width 18 of 20, seven heads would share four key heads."""
    settings = config(tmp_path, width=20, heads=8, kv_heads=4)
    rungs = ladder(settings, "heads")
    assert all(model.heads % model.kv_heads == 0 for model in rungs)
    assert 18 not in [model.width for model in rungs]
    assert {10, 15, 20} <= {model.width for model in rungs}


def search(reaching: set[int], rungs: int, most: int = 1) -> dict[int, bool]:
    """All results of a search where exactly these rungs reach the loss."""
    results: dict[int, bool] = {}
    while wanted := next_rungs(results, rungs, most):
        assert len(wanted) <= most
        assert not set(wanted) & results.keys()
        results |= {rung: rung in reaching for rung in wanted}
    return results


@pytest.mark.parametrize("most", [1, 2, 5])
@pytest.mark.parametrize("rungs", [1, 2, 7, 40])
def test_the_search_finds_the_smallest_and_trains_few(rungs: int, most: int) -> None:
    for smallest in range(rungs):
        results = search(set(range(smallest, rungs)), rungs, most)
        assert smallest_reaching(results) == smallest
        # The full model, a bisection in most + 1 parts, and one rung more below.
        rounds = math.ceil(math.log(rungs + 1, most + 1)) + 1
        assert len(results) <= 2 + most * rounds


def test_a_smaller_model_that_reaches_by_luck_or_noise_is_found() -> None:
    """A bisection ends at 20, with 19 missed; 18 reaches too, and so the search goes on below."""
    results = search({18, 12, *range(20, 40)}, 40)
    assert smallest_reaching(results) == 18
    assert not any(results[rung] for rung in (16, 17, 19))


def test_where_none_reaches_two_of_the_largest_are_trained() -> None:
    assert search(set(), 40) == {39: False, 38: False}
    assert smallest_reaching({39: False, 38: False}) is None


def test_a_full_model_that_misses_by_noise_does_not_end_the_search() -> None:
    results = search(set(range(10, 39)), 40)
    assert smallest_reaching(results) == 10


def test_where_all_reach_the_search_ends_at_the_bottom() -> None:
    results = search(set(range(40)), 40)
    assert smallest_reaching(results) == 0
    assert all(results.values())


def test_a_search_goes_on_from_results_of_any_kind() -> None:
    """Interrupted, and continued with another number of processes."""
    before = {39: True, 9: False, 19: True}
    assert next_rungs(before, 40, 1) == [14]
    assert next_rungs(before, 40, 4) == [11, 13, 15, 17]
    assert next_rungs({9: False}, 40, 4) == [39]
