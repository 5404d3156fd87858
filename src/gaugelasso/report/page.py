"""One self-contained HTML page about a run, or about the seeds of one condition.

Pictures, style and script (page.css, page.js) are inlined, and the page loads nothing. Every
string from a run is escaped; the script gets its data as JSON and adds text, never markup.
Without JavaScript all tables and pictures can be read.
"""

import base64
import hashlib
import html
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gaugelasso.report.baseline import Data, baseline_table, sentences, trained_table
from gaugelasso.report.event_table import events_table, exchange_table
from gaugelasso.report.formats import DASH
from gaugelasso.report.layout import Table, to_html
from gaugelasso.report.page_data import page_data, to_script
from gaugelasso.report.run import Run
from gaugelasso.report.saturation import saturation_table, shares_table
from gaugelasso.report.tables import before_after, run_tables, runs_table
from gaugelasso.report.toml import comment, to_toml
from gaugelasso.report.verdict import headline, verdict
from gaugelasso.runs.units import noun
from gaugelasso.runs.writing import write_text

_ORIGIN = (
    "command", "commit", "hardware", "date", "gaugelasso", "torch", "numpy", "python",
    "platform", "threads",
)  # fmt: skip

_STYLE, _SCRIPT = (
    Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("page.css", "page.js")
)
# The picture in words, and its caption.
_PROFILE = (
    "Surviving channels of every axis against depth, at several training steps",
    "Channels that survive on each axis, by depth. Colour is the training step; a cross "
    "marks a removed operator, in the colour of the first snapshot without it. "
    "Last panel: residual sites D, embedding d_e and classifier "
    "d_c (left scale) and work per token (right scale) against training step.",
)
_OWN_PROFILE = (
    "The share of channels that is left on each axis, and work per token, against training step",
    "Left: the share of its channels that each axis has left, darker where it is more, and what "
    "remains in the end. Grey: the operator is removed. Right: work per token. Dashed line: "
    "cooldown starts.",
)
# What the shares of widths mean: those of pretrained weights are given.
_FRESH = (
    "An axis at its ceiling may need a larger initial width; one that keeps little was larger than "
    "the task requires."
)
_PRETRAINED = (
    "The original uses nearly all of an axis at its ceiling on this text, and little of one that "
    "keeps little."
)
# A second defence: a string that was not escaped still cannot load or run anything, because only
# the script of this digest may run.
_DIGEST = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode("ascii")
_POLICY = (
    f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{_DIGEST}'"
)
_EXPLORER = """<section class="explorer" id="explorer" hidden>
<h2>Structure, step by step</h2>
<div class="scrub"><div class="controls"><button id="play" type="button">Play</button>
<select id="run" aria-label="run" hidden></select><output id="now"></output></div>
<input type="range" id="step" min="0" max="0" step="1" aria-label="training step">
<svg class="timeline" id="timeline" aria-hidden="true"></svg></div>
<dl class="figures" id="figures"></dl>
<p class="event" id="event"></p>
<div class="ends" id="ends"></div>
<table id="structure" aria-label="widths at this step"></table>
<p class="soft">A number is the width that is left; its bar is the share of the initial width, and
hatching marks a removed operator{absent}.{several} Marks below the scrubber are structural events:
the longer, the more work went{returned}.{thinned}</p>
<h2>Curves</h2>
{unlogged}<div class="curves" id="curves"></div>
<p class="soft">Dotted: loss target. Dashed: cooldown starts{frozen}. Press or drag on a
curve to move through the steps. Long curves keep the least and the greatest value of equal
parts.</p>
<div class="tip" id="tip" hidden></div>
</section>
<noscript><p class="soft">The structure at each step and the training curves need JavaScript. All
tables and pictures are here without it.</p></noscript>
"""
_SEVERAL = " Over seeds a number is the median, and a pale bar ends at the widest seed."
_ABSENT = "; an empty cell: the run began without it"
_RETURNED = ", or came back where they are orange (a rollback)"
_UNLOGGED = (
    '<p class="soft">No logging interval has ended yet: curves of loss, metric and step time begin '
    "with the first one.</p>\n"
)
_FROZEN = " and the structure is frozen"
_THINNED = " Of many events, some are left out evenly; the last is shown."


def write_page(
    runs: Sequence[Run],
    path: Path,
    profile: bytes,
    saturation: bytes | None,
    samples: bytes | None = None,
    baseline: tuple[Data, bytes] | None = None,
) -> None:
    """Write the page with its pictures, given as PNGs.

    Not every task has samples, and only the built-in transformer has a saturation picture.
    `baseline` is the content of a baseline.json and its picture.
    """
    held, sentence = verdict(runs)
    css_class = {True: "held", False: "missed", None: "soft"}[held]
    title = headline(runs)
    data = page_data(runs)
    explorer = _EXPLORER.format(
        absent=_ABSENT if any(None in row["cells"] for row in data["rows"]) else "",
        several=_SEVERAL if len(runs) > 1 else "",
        returned=_RETURNED if any(any(run["frames"]["back"]) for run in data["runs"]) else "",
        unlogged="" if any(run.metrics for run in runs) else _UNLOGGED,
        thinned=_THINNED if data["thinned"] else "",
        frozen=_FROZEN if all(run.frozen_in_cooldown for run in runs) else "",
    )
    spread = " Lines are medians over seeds; hatching shows their range." if len(runs) > 1 else ""
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        f'<p class="{css_class}">{html.escape(sentence)}</p>',
        f'<p class="soft">{html.escape(_subject(runs))}</p>',
        explorer,
        to_html(before_after(runs)),
        to_html(runs_table(runs)) if len(runs) > 1 else "",
        *(_worth(*baseline) if baseline else ()),
        "<h2>Structural profile</h2>",
        _image(
            profile,
            *(_OWN_PROFILE if runs[0].own_model else _PROFILE),
            spread,
        ),
        to_html(saturation_table(runs)),
        *(_saturation(runs, saturation) if saturation else ()),
        *(_samples(runs[0], samples) if samples else ()),
        *_structures(runs),
        to_html(events_table(runs)),
        *([to_html(exchanges)] if (exchanges := exchange_table(runs)) else []),
        to_html(_origin(runs)),
        "<h2>Configuration</h2>",
        f"<pre>{html.escape(_config(runs))}</pre>",
    ]
    write_text(
        path,
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(runs[0].task)}: {html.escape(title)}</title>\n"
        f"<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(filter(None, parts))
        + f'\n<script type="application/json" id="data">{to_script(data)}</script>'
        + f"\n<script>{_SCRIPT}</script>"
        + "\n</body>\n</html>\n",
    )


def _saturation(runs: Sequence[Run], picture: bytes) -> list[str]:
    shares = shares_table(runs)
    image = _image(
        picture,
        "Share of its initial width that every axis kept, layer by layer",
        "Share of its initial width that every axis kept, in per cent. "
        + (_PRETRAINED if runs[0].is_pretrained else _FRESH)
        + (" Medians over seeds." if len(runs) > 1 else ""),
    )
    table = to_html(shares, title=False)
    return [image, f"<details><summary>{shares.title}</summary>{table}</details>"]


def _image(png: bytes, alternative: str, caption: str, more: str = "") -> str:
    caption += more
    data = base64.b64encode(png).decode("ascii")
    return (
        f'<figure><div class="wide"><img alt="{html.escape(alternative)}" '
        f'src="data:image/png;base64,{data}"></div>'
        f"<figcaption>{html.escape(caption)}</figcaption></figure>"
    )


def _subject(runs: Sequence[Run]) -> str:
    first = runs[0]
    seeds = ", ".join(run.mark for run in runs)
    which = f"{first.told_by}s" if len(runs) > 1 else first.told_by
    if len(runs) == 1 and not first.is_own_loop:
        which = f"run {first.name}, seed"
    cost = f"{noun(first.accounting)} by the accounting {first.accounting!r}"
    return f"task {first.task}; {which} {seeds}; {cost}"


def _worth(data: Data, picture: bytes) -> list[str]:
    """The run against plain training of uniform models, and of its own structure."""
    table, trained = baseline_table(data), trained_table(data)
    return [
        f"<h2>{html.escape(table.title)}</h2>",
        *(f"<p>{html.escape(line)}</p>" for line in sentences(data)),
        to_html(table, title=False),
        _image(
            picture,
            "Test loss against work of uniform models and of the run, and their figures",
            "Left: test loss of every model that was trained; filled marks reached the run's loss "
            "on selection data. Right: figures relative to the run, on a log scale.",
        ),
        f"<details><summary>{trained.title}</summary>{to_html(trained, title=False)}</details>",
    ]


def _samples(run: Run, picture: bytes) -> list[str]:
    """Examples of what the finished model does."""
    names = ", ".join(run.samples())
    caption = f"Held-out examples, one per column: {names}. {run.told_by.capitalize()} {run.mark}."
    return ["<h2>Examples</h2>", _image(picture, caption, caption)]


def _structures(runs: Sequence[Run]) -> list[str]:
    """The structure of every run; of several runs, only the first is expanded."""
    if len(runs) == 1:
        return [to_html(table) for table in run_tables(runs[0])]
    parts = ["<h2>Structures</h2>"]
    for run in runs:
        is_open = " open" if run is runs[0] else ""
        structure, *others = run_tables(run)
        tables = to_html(structure, title=False) + "".join(map(to_html, others))
        parts.append(
            f"<details{is_open}><summary>{html.escape(run.title)}</summary>{tables}</details>"
        )
    return parts


def _origin(runs: Sequence[Run]) -> Table:
    """What is needed to reproduce the figures; values that differ between runs are all listed."""
    rows = [
        [key, _distinct(value for run in runs for value in run.environment_values(key))]
        for key in _ORIGIN
    ]
    if not runs[0].is_own_loop:
        rows.append(["seed", _distinct(run.seed for run in runs)])
    for key in ("device", "precision"):
        rows.append([key, _distinct((run.summary or {}).get(key) for run in runs)])
    rows.append(["run folder", _distinct(run.path for run in runs)])
    return Table("Where the figures come from", ["", ""], rows, left=(0, 1))


def _distinct(values: Iterable[Any]) -> str:
    known = [str(value) for value in values if value is not None]
    return "; ".join(dict.fromkeys(known)) or DASH


def _config(runs: Sequence[Run]) -> str:
    """The config as TOML; of several runs, that of the first."""
    toml = to_toml(runs[0].config).strip()
    if len(runs) == 1:
        return toml
    others = "have the same" if runs[0].is_own_loop else "differ in train.seed"
    return comment(f"{runs[0].title}; the other runs {others}") + "\n" + toml
