"""The tries of a squeeze as a table, and what came out as a sentence."""

from collections.abc import Mapping
from typing import Any

from gaugelasso.report import formats
from gaugelasso.report.formats import figure, known, ratio, short
from gaugelasso.report.layout import Table, to_markdown
from gaugelasso.runs.units import amount, noun, number

Data = Mapping[str, Any]


def squeeze_table(data: Data) -> str:
    """The run and all tries, in the order in which they were made."""
    counted, score = data["accounting"], formats.metric_format(data["metric"])
    rows = [
        [
            "run" if row["from"] is None else str(place),
            str(row["seed"]),
            number(row["work"], counted),
            known(row["selection_loss"], figure),
            known(row["loss"], figure),
            known(row["metric"], score),
            short(row["training_fma"]),
            "keeps" if row["held"] else "misses",
        ]
        for place, row in enumerate(data["rows"])
    ]
    headers = ["try", "seed", noun(counted), "selection loss", "test loss", data["metric"],
               "training work", "the loss"]  # fmt: skip
    title = f"Smaller models at a selection loss of {figure(data['limit'])}"
    return to_markdown(Table(title, headers, rows, left=(0, 7)))


def squeeze_sentence(data: Data) -> str:
    """Which model is the smallest, how much smaller than the run's, and what that took."""
    first, counted = data["rows"][0], data["accounting"]
    best = next(row for row in data["rows"] if row["folder"] == data["smallest"])
    took = (
        f"{len(data['rows']) - 1} tries with {ratio(data['training_fma'] / first['training_fma'])} "
        "the training work of the run"
    )
    own = amount(first["work"], counted)
    if best is first:
        return f"No smaller model keeps the loss: the run stays the smallest, with {own} ({took})."
    return (
        f"{amount(best['work'], counted)}, {ratio(first['work'] / best['work'])} less than the "
        f"{own} of the run, at a test loss of {known(best['loss'], figure)} ({took}). "
        f"Model: {best['folder']}"
    )
