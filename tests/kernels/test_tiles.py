"""Tiles that are measured: they fit the product, and are used for what they were measured for."""

from gaugelasso.kernels.tiles import (
    ATTENTION,
    DECODING,
    FEW,
    GATED,
    JOINED,
    PRODUCTS,
    SMALL,
    applies,
    candidates,
    joined_candidates,
)


def test_candidates_waste_less_than_half_of_their_columns() -> None:
    for tokens in (1, 64, FEW, FEW + 1, 50_000):
        for columns in (1, 16, 40, 100, 700):
            for gated in (False, True):
                found = candidates(tokens, columns, gated)
                assert found
                narrowest = min(each.columns for each in found)
                assert all(
                    each.columns < 2 * columns or each.columns == narrowest for each in found
                )
    assert {each.tokens for each in candidates(1, 700)} == {16}
    assert set(candidates(50_000, 700)) == set(PRODUCTS)
    assert set(candidates(50_000, 700, True)) == set(GATED)


def test_a_tile_is_used_for_what_it_was_measured_for() -> None:
    assert not {*SMALL} & {*PRODUCTS, *GATED}
    assert not {*DECODING} & {*ATTENTION}
    assert applies(None, 1) is None
    assert applies(SMALL[0], FEW) == SMALL[0]
    assert applies(SMALL[0], FEW + 1) is None
    for tile in (*PRODUCTS, *GATED):
        assert applies(tile, FEW + 1) == tile
        assert applies(tile, FEW) is None


def test_a_whole_mlp_has_the_tiles_that_fit_into_shared_memory() -> None:
    """Those of bfloat16 that an H200 has compiled, and those that it refused."""
    assert joined_candidates(64, 80, 2) == list(JOINED)
    assert [str(tile) for tile in joined_candidates(272, 208, 2)] == [
        "128x64x0/8w1", "128x32x0/8w3", "128x32x0/8w2", "64x32x0/4w3",
    ]  # fmt: skip
    assert [str(tile) for tile in joined_candidates(432, 240, 2)] == ["128x64x0/8w1"]
    assert joined_candidates(512, 256, 4) == []
