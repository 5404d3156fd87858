"""Compares the tensors of a source with those that its settings call for."""

from collections.abc import Collection, Iterable

import torch

from gaugelasso.errors import UserError
from gaugelasso.importing.source import Source


def check_tensors(
    source: Source,
    expected: Iterable[tuple[str, tuple[int, ...]]],
    known: Collection[str] = (),
    hint: str = "",
) -> None:
    """UserError unless the source has just the expected tensors, and those that are `known`.

    `expected` are names and shapes. They may be lazy, because a damaged number of layers may be
    enormous. `hint` says what a tensor without a place may mean.
    """
    left = set(source.shapes) - set(known)
    for name, shape in expected:
        if name not in source.shapes:
            raise UserError(f"{str(source.path)!r}: tensor {name!r} is missing")
        if source.shapes[name] != shape:
            raise UserError(
                f"{str(source.path)!r}: tensor {name!r} has the shape {source.shapes[name]}, its "
                f"settings call for {shape}"
            )
        left.discard(name)
    for name in sorted(left):
        raise UserError(
            f"{str(source.path)!r}: tensor {name[:100]!r} has no place in the transformer{hint}"
        )


def check_tied(source: Source, head: str, table: str) -> None:
    """UserError if the source has a head that differs from the table that it is tied to.

    Earlier versions of transformers saved a tied head too.
    """
    if head in source.shapes and not torch.equal(source.read(head), source.read(table)):
        raise UserError(
            f"{str(source.path)!r}: {head!r} is not {table!r}, which the settings call for"
        )
