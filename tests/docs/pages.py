"""What tests of pages share: the pages, their blocks, tables and commands."""

import dataclasses
import importlib
import re
import typing
from pathlib import Path
from typing import Any

import typer

from gaugelasso.cli import app
from gaugelasso.config import Config, ModelConfig

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = [README, *sorted(DOCS.rglob("*.md"))]
# Pages that single tests read.
CONFIGURATION = DOCS / "reference" / "configuration.md"
EQUATIONS = DOCS / "reference" / "equations.md"
COMMAND_LINE = DOCS / "reference" / "command-line.md"
RUN_FOLDER = DOCS / "reference" / "run-folder.md"
PYTHON_API = DOCS / "reference" / "python-api.md"
OWN_TASK = DOCS / "how-to" / "own-task.md"
OWN_LOOP = DOCS / "how-to" / "own-loop.md"
OWN_MODEL = DOCS / "how-to" / "own-model.md"
CONTROLS = DOCS / "how-to" / "controls.md"
SERVING = DOCS / "how-to" / "serving.md"
WHERE_THINGS_ARE = DOCS / "development" / "where-things-are.md"
SECTIONS: dict[str, Any] = {
    name: cls for name, cls in typing.get_type_hints(Config).items() if "task" not in name
} | {"model": ModelConfig}
_BLOCK = re.compile(
    r"(?:<!-- (?P<mark>[^>]+) -->\n)?^```(?P<kind>\w+)\n(?P<text>.*?)^```", re.M | re.S
)


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block of a page; `mark` is the comment right before it."""

    page: Path
    kind: str
    text: str
    mark: str | None

    def __str__(self) -> str:
        return f"{self.page.stem}: {self.text.strip().splitlines()[0][:40]}"


def blocks(page: Path) -> list[Block]:
    return [Block(page, m["kind"], m["text"], m["mark"]) for m in _BLOCK.finditer(read(page))]


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def rows(text: str) -> list[list[str]]:
    """The cells of every row of the tables in a text, heads and rules left out."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rules = [k for k, line in enumerate(lines) if set(line) <= set("|-: ")]
    kept = [line for k, line in enumerate(lines) if k not in rules and k + 1 not in rules]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in kept]


def under(heading: str, page: Path) -> str:
    """The text between a heading and the next one."""
    _, found, rest = read(page).partition(f"\n{heading}\n")
    assert found, f"{page.name} has no heading {heading!r}"
    return re.split(r"^#+ ", rest, maxsplit=1, flags=re.M)[0]


ALL_BLOCKS = [block for page in PAGES for block in blocks(page)]
PYTHON = [block for block in ALL_BLOCKS if block.kind == "python"]


def write_task(page: Path, path: Path) -> None:
    """Save the first program of a page, as the page says."""
    path.write_text(next(block.text for block in blocks(page) if block.mark == "runnable"))


def resolve(name: str) -> Any:
    """The object that a dotted name, relative to the package, stands for."""
    parts = ["gaugelasso", *name.removeprefix("gaugelasso.").split(".")]
    for end in range(len(parts) - 1, 0, -1):
        try:
            thing: Any = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            thing = getattr(thing, part)
        return thing
    raise AssertionError(name)


COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def commands(program: str, pages: list[Path] = PAGES) -> list[str]:
    """The lines in shell blocks that call a program, each once."""
    shell = [block for page in pages for block in blocks(page) if block.kind == "sh"]
    lines = [line for block in shell for line in block.text.replace("\\\n", "").splitlines()]
    return list(dict.fromkeys(line for line in lines if line.startswith(f"{program} ")))
