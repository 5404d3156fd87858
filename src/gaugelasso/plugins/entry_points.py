"""Tasks and models of installed packages, which declare them as entry points."""

from importlib.metadata import EntryPoint, entry_points
from typing import Any

from gaugelasso.errors import UserError, first_line


def installed_names(group: str) -> list[str]:
    """The names that installed packages declare in a group, sorted."""
    return sorted({point.name for point in entry_points(group=group)})


def find_entry_point(key: str, group: str, name: str) -> Any:
    """What an installed package declares under this name; None if no package does.

    UserError if several packages do, or if it cannot be imported.
    """
    found = {point.value: point for point in entry_points(group=group, name=name)}
    if len(found) > 1:
        packages = " and ".join(sorted(map(_package, found.values())))
        raise UserError(
            f"{key} = {name!r}: {packages} both declare this name; uninstall one, or use "
            f"{key.partition('.')[0]}.module"
        )
    for point in found.values():
        try:
            return point.load()
        except (Exception, SystemExit) as error:
            raise UserError(
                f"{key} = {name!r}: importing {point.value!r} of {_package(point)} raised "
                f"{type(error).__name__}: {first_line(error)}"
            ) from error
    return None


def _package(point: EntryPoint) -> str:
    return f"{point.dist.name!r}" if point.dist is not None else f"{point.value!r}"
