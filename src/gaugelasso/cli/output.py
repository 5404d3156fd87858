"""What commands say, on one console."""

from rich.console import Console

console = Console()


def say(text: str) -> None:
    """A plain line: names that users chose may look like markup."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)
