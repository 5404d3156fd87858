"""The pictures of compression beside its rivals are of the results files that lie here."""

from pathlib import Path
from typing import Any

import pytest
from benchmarks.rival_pictures import (
    RETRIEVAL_PICTURE,
    ROOT,
    SMALL_PICTURE,
    digest,
    draw_small,
    retrieval_rows,
    rows_of,
    small_rows,
)
from PIL import Image


def run(method: str, seed: int, fma: float, loss: float | None = 0.5) -> dict[str, Any]:
    return {"method": method, "seed": seed, "fma_final": fma, "loss": loss}


def test_a_dot_is_filled_where_the_run_has_the_work_that_was_asked() -> None:
    names, works = {"cofi": "CoFi", "compression": "ours", "none": "no runs"}, {42: 100, 43: 200}
    runs = [
        run("cofi", 42, 110), run("cofi", 43, 221, 0.25), run("cofi", 42, 90, None),
        run("compression", 43, 300),
    ]  # fmt: skip
    first, second = rows_of(runs, names, works)
    assert (first.name, first.runs) == ("CoFi", [(0.5, True), (0.25, False)])
    assert (second.name, second.runs) == ("ours", [(0.5, True)])


@pytest.mark.parametrize(
    ("picture", "rows"),
    [(RETRIEVAL_PICTURE, retrieval_rows(ROOT)), (SMALL_PICTURE, small_rows(ROOT))],
)
def test_the_pictures_are_of_the_present_results(picture: Path, rows: object) -> None:
    """`make tables` draws them."""
    with Image.open(ROOT / picture) as image:
        assert image.info["Description"] == digest(rows)


def test_losses_of_zero_are_drawn(tmp_path: Path) -> None:
    tasks = small_rows(ROOT)
    assert min(loss for _, rows in tasks.values() for row in rows for loss, _ in row.runs) == 0
    draw_small(tasks, tmp_path / "small.png")
    with Image.open(tmp_path / "small.png") as image:
        assert image.size == (2000, 1500)
