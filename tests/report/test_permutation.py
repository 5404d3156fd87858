"""The permutation test of compare: p values over seeds, and where there are too few of them."""

import pytest

from gaugelasso.report.permutation import permutation_p


def test_p_counts_the_exchanges_that_are_as_far_apart() -> None:
    # 4 of 8 values: 70 ways, and only the observed one and its mirror image are so far apart.
    assert permutation_p([1, 2, 3, 4], [11, 12, 13, 14]) == pytest.approx(2 / 70)
    assert permutation_p([1, 2, 3, 4], [1, 2, 3, 4]) == 1.0
    # 2 of 7 values: 21 ways, and no mirror image.
    assert permutation_p([0, 0, 0, 0, 0], [1, 1]) == pytest.approx(1 / 21)


def test_many_seeds_are_tested_with_random_exchanges() -> None:
    assert permutation_p(range(10), range(100, 110)) == pytest.approx(2 / 184_756)  # all exchanges
    # 12 against 12: of 2.7 million exchanges two are as far apart.
    assert permutation_p(range(12), range(100, 112)) == pytest.approx(1e-5, abs=1e-5)
    again = permutation_p([0.1 * i for i in range(12)], [0.1 * i + 0.05 for i in range(12)])
    assert again is not None
    assert 0.7 < again <= 1
    assert again == permutation_p([0.1 * i for i in range(12)], [0.1 * i + 0.05 for i in range(12)])


@pytest.mark.parametrize(("one", "other"), [(3, 3), (1, 10), (2, 5), (0, 5)])
def test_too_few_seeds_are_not_tested(one: int, other: int) -> None:
    found = permutation_p([0.0] * one, [9.0] * other)
    assert (found is None) == ((one, other) != (2, 5))
