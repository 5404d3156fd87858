"""Examples: images from the task that show the finished model, one row per name."""

from pathlib import Path
from typing import IO

from gaugelasso.report.figure import FONT, INK, WIDTH_PX, new_figure, save, to_ascii
from gaugelasso.report.run import Run


def draw_samples(run: Run, path: Path | IO[bytes]) -> None:
    """Write the PNG; the run must have samples."""
    rows = run.samples()
    columns = max(map(len, rows.values()))
    height, width = next(iter(rows.values())).shape[1:3]
    figure = new_figure(round(WIDTH_PX * len(rows) / columns * height / width))
    grid = figure.subplots(len(rows), columns, squeeze=False)
    for axes in grid.flat:
        axes.set(xticks=[], yticks=[], frame_on=False)
    for line, (name, images) in zip(grid, rows.items(), strict=True):
        line[0].set_ylabel(to_ascii(name), fontsize=FONT, color=INK, parse_math=False)
        for axes, image in zip(line, images, strict=False):
            axes.imshow(image, interpolation="nearest")
    save(figure, path)
