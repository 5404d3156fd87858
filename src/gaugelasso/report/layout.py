"""A table of strings and its three printed forms: terminal, Markdown, HTML.

Cells are text, never markup: each form escapes them.
"""

import html
from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

_LONG = 24  # characters of a cell whose column the style keeps wide


@dataclass(frozen=True)
class Table:
    """Headers and rows of strings.

    `left` lists the left-aligned columns, which hold text. The last `foot` rows summarise
    the others.
    """

    title: str
    headers: list[str]
    rows: list[list[str]]
    note: str = ""
    left: tuple[int, ...] = (0,)
    foot: int = 0


def render(table: Table, console: Console) -> None:
    """Print to a terminal."""
    rich = RichTable(title=Text(table.title), caption=Text(table.note), title_justify="left",
                     caption_justify="left")  # fmt: skip
    for index, header in enumerate(table.headers):
        # Folded on a narrow terminal: a truncated number would be misread.
        justify: Literal["left", "right"] = "left" if index in table.left else "right"
        rich.add_column(Text(header), justify=justify, overflow="fold")
    body = len(table.rows) - table.foot
    for index, row in enumerate(table.rows):
        rich.add_row(*map(Text, row), end_section=index == body - 1 and table.foot > 0)
    console.print(rich)


def to_markdown(table: Table) -> str:
    """Title, table, note; ends with a newline."""
    marks = [":--" if index in table.left else "--:" for index in range(len(table.headers))]
    lines = [_markdown_row(table.headers), "|" + "|".join(marks) + "|"]
    lines += [_markdown_row(row) for row in table.rows]
    note = ["", _one_line(table.note)] if table.note else []
    return "\n".join([f"### {_one_line(table.title)}", "", *lines, *note]) + "\n"


def _markdown_row(cells: list[str]) -> str:
    return "| " + " | ".join(map(_one_line, cells)) + " |"


def _one_line(text: str) -> str:
    """Escapes what would end a row or cell or start an HTML tag."""
    return html.escape(" ".join(text.split()), quote=False).replace("|", r"\|")


def to_html(table: Table, title: bool = True) -> str:
    """A <figure> with the table and its note."""
    heads = "".join(_html_cell("th", cell, i, table) for i, cell in enumerate(table.headers))
    body = len(table.rows) - table.foot
    rows = [
        f"<tr{' class=foot' if index >= body else ''}>"
        + "".join(_html_cell("td", cell, i, table) for i, cell in enumerate(row))
        + "</tr>"
        for index, row in enumerate(table.rows)
    ]
    caption = f"<figcaption>{html.escape(table.note)}</figcaption>" if table.note else ""
    above = f"<h2>{html.escape(table.title)}</h2>\n" if title else ""
    return (
        f'{above}<figure><div class="wide">'
        f'<table aria-label="{html.escape(table.title)}">\n<thead><tr>{heads}</tr></thead>\n<tbody>'
        + "\n".join(rows)
        + f"</tbody></table></div>{caption}</figure>\n"
    )


def _html_cell(tag: str, cell: str, column: int, table: Table) -> str:
    if column in table.left:
        kind = "text long" if len(cell) > _LONG else "text"
        return f'<{tag} class="{kind}">{html.escape(cell)}</{tag}>'
    # The style may break the line before a deviation.
    mean, sign, deviation = html.escape(cell).partition(" ± ")
    return f"<{tag}>{mean}" + (f" <span>± {deviation}</span>" if sign else "") + f"</{tag}>"
