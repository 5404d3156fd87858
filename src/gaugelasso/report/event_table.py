"""The tables of a run's structural events: the largest drops, and all exchanges of channels."""

from collections.abc import Mapping, Sequence

from gaugelasso.report import formats
from gaugelasso.report.costs import work_format
from gaugelasso.report.formats import count, known
from gaugelasso.report.layout import Table
from gaugelasso.report.run import Run
from gaugelasso.runs.units import noun

_LARGEST_EVENTS = 20
_NAMED = 3  # axes in a cell of channels, and operators


def events_table(runs: Sequence[Run], most: int = _LARGEST_EVENTS) -> Table:
    """The events that saved the most work, largest first, with the loss before and after."""
    events = [(run, event) for run in runs for event in run.events]
    drops = [pair for pair in events if pair[1]["dropped"]]
    drops.sort(key=lambda pair: pair[1]["fma"] - pair[1]["fma_before"])
    rows = []
    cost, form = noun(runs[0].accounting), work_format(runs[0].accounting)
    for run, event in drops[:most]:
        before, after = event["fma_before"], event["fma"]
        losses = [event.get(f"loss_{when}") for when in ("before", "balanced", "after")]
        rows.append([
            *([run.mark] if len(runs) > 1 else []),
            count(event["step"]), form(before), form(after),
            form(before - after), f"{(before - after) / before:.1%}",
            *(known(loss, formats.figure) for loss in losses),
            counted_channels(event["dropped"]), operator_list(event["removed"]),
        ])  # fmt: skip
    headers = [
        "step",
        f"{cost} before",
        f"{cost} after",
        f"{cost} saved",
        "share",
        "loss before",
        "after balance",
    ]
    headers = [*([runs[0].told_by] if len(runs) > 1 else []), *headers]
    headers += ["after cut", "channels dropped", "operators removed"]
    refused = sum(bool(event["refused"]) for _, event in events)
    note = f"{len(events)} events, {len(drops)} with a drop, {refused} refused"
    if exchanges := sum(bool(event.get("grown")) for _, event in events):
        note += f", {exchanges} with an exchange"
    for what in ("split", "balance", "cut", "operator", "exchange"):
        if undone := sum(what in event.get("undone", {}) for _, event in events):
            note += f", {undone} with the {what} undone"
    note += f". Share: {cost} saved relative to {cost} before. Losses are measured on one training "
    note += "batch: before the event, after balancing, and after the cut."
    text = (len(headers) - 2, len(headers) - 1)
    return Table(f"Largest drops (at most {most})", headers, rows, note, text)


def axis_name(name: str) -> str:
    return name.removeprefix("operators.")


def exchange_table(runs: Sequence[Run]) -> Table | None:
    """Every exchange of channels, in order; None if there was none."""
    events = [(run, event) for run in runs for event in run.events if event.get("grown")]
    if not events:
        return None
    cost, form = noun(runs[0].accounting), work_format(runs[0].accounting)
    rows = [
        [
            *([run.mark] if len(runs) > 1 else []),
            count(event["step"]),
            form(event["fma"]),
            counted_channels(event.get("exchanged", {})),
            counted_channels(event["grown"]),
        ]
        for run, event in events
    ]
    headers = ["step", f"{cost} after", "channels taken", "channels grown"]
    headers = [*([runs[0].told_by] if len(runs) > 1 else []), *headers]
    note = f"An exchange mostly lowers the {cost} by less than the price of one channel it took."
    text = (len(headers) - 2, len(headers) - 1)
    return Table("Channels exchanged", headers, rows, note, text)


def counted_channels(channels: Mapping[str, int]) -> str:
    """A number of channels, and the axes that have the most of them."""
    largest = sorted(channels.items(), key=lambda item: -item[1])
    named = [f"{axis_name(axis)} {number}" for axis, number in largest[:_NAMED]]
    more = len(largest) - len(named)
    named += [f"{more} more {'axis' if more == 1 else 'axes'}"] if more else []
    return f"{sum(channels.values())}: {', '.join(named)}"


def operator_list(names: Sequence[str]) -> str:
    """Some operators by name, and how many more they are."""
    named, more = [axis_name(name) for name in names[:_NAMED]], len(names[_NAMED:])
    named += [f"{more} more operator{'' if more == 1 else 's'}"] if more else []
    return ", ".join(named)
