"""The tries of a squeeze as a table, and what came out as a sentence."""

from collections.abc import Mapping
from typing import Any

from gaugelasso.report import formats
from gaugelasso.report.formats import figure, known, ratio, short
from gaugelasso.report.layout import Table, to_markdown
from gaugelasso.runs.units import amount, noun, number

Data = Mapping[str, Any]


def try_sentence(row: Data, counted: str) -> str:
    """What came of one try, while others go on."""
    if row["work"] is None:
        return f"{row['folder']}: failed, see its log"
    named = f" of {number(row['named_work'], counted)} named" if row["named_work"] else ""
    loss, verb = known(row["selection_loss"], figure), _verb(row)
    return f"{amount(row['work'], counted)}{named}, selection loss {loss}: {verb} the target"


def squeeze_table(data: Data) -> str:
    """The run and all tries, in the order in which they were made."""
    counted, score = data["accounting"], formats.metric_format(data["metric"])
    rows = [
        [
            "run" if row["from"] is None else str(place),
            known(row["seed"], "{:.0f}".format),
            known(row["work"], lambda work: number(work, counted)),
            known(row["selection_loss"], figure),
            known(row["loss"], figure),
            known(row["metric"], score),
            known(row["training_fma"], short),
            _verb(row),
        ]
        for place, row in enumerate(data["rows"])
    ]
    headers = ["try", "seed", noun(counted), "selection loss", "test loss", data["metric"],
               "training work", "the target"]  # fmt: skip
    title = f"Smaller models at a selection loss of {figure(data['limit'])}"
    return to_markdown(Table(title, headers, rows, left=(0, 7)))


def squeeze_sentence(data: Data) -> str:
    """Which model is the smallest, how much smaller than the run's, and what that took."""
    (first, *tries), counted = data["rows"], data["accounting"]
    best = next(row for row in data["rows"] if row["folder"] == data["smallest"])
    own = amount(first["work"], counted)
    if not tries:
        return f"Nothing was tried: no cut that is worth a try leads below the {own} of the run."
    took = f"{len(tries)} {'try' if len(tries) == 1 else 'tries'}"
    if first["training_fma"]:
        took += (
            f", {ratio(data['training_fma'] / first['training_fma'])} the training work of the run"
        )
    if best is not first:
        return (
            f"{amount(best['work'], counted)}, {ratio(first['work'] / best['work'])} less than the "
            f"{own} of the run, at a test loss of {known(best['loss'], figure)} ({took}). "
            f"Model: {best['folder']}"
        )
    if first["held"]:
        return f"No smaller model keeps the target: the smallest is the run, with {own} ({took})."
    return f"No smaller model has the target, and the run of {own} has it neither ({took})."


def _verb(row: Data) -> str:
    return "keeps" if row["held"] else "misses"
