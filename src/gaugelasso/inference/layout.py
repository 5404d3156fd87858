"""The order of the residual sites: an operator's sites become as few runs as can be.

A run is a stretch of adjacent sites that an operator reads (or writes), with a site that it does
not on either side. Few runs mean contiguous memory. The order of the sites is free: a
permutation of the stream that all operators follow changes no output.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gaugelasso.models import TransformerSpec


def reaches(spec: TransformerSpec) -> list[tuple[int, ...]]:
    """The sites of every read and write, from the embedding to the classifier."""
    inner = [sites for op in spec.operators for sites in (op.reads, op.writes)]
    return [spec.embed, *inner, spec.classify]


def count_runs(sites: Sequence[int]) -> int:
    """The number of stretches of adjacent sites."""
    ordered = sorted(sites)
    return sum(site - 1 != before for before, site in zip([-2, *ordered], ordered, strict=False))


def total_runs(spec: TransformerSpec, order: Tensor) -> int:
    """Runs of all reads and writes, if the sites are stored in this order."""
    place = inverse(order).tolist()
    return sum(count_runs([place[site] for site in sites]) for sites in reaches(spec))


def inverse(order: Tensor) -> Tensor:
    """The place of every site: order[place[site]] = site."""
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    return place


def site_order(spec: TransformerSpec) -> Tensor:
    """An order of the sites [D] with few runs: a chain of nearest neighbours.

    Describe a site by which reads and writes contain it. A run begins or ends between two
    neighbours where one is contained and the other is not. So the number of all runs is half of
    the summed Hamming distance between neighbours, ends included, and the fewest runs are the
    shortest path through all sites. The path is built greedily: it begins at the site
    that the fewest reads and writes contain, and always continues with the nearest site that is
    left, the lowest number first. Sites in an order with fewer runs to begin with keep it.
    """
    sets = reaches(spec)
    member = torch.zeros(len(spec.sites), len(sets))
    for column, sites in enumerate(sets):
        member[list(sites), column] = 1
    counts = member.sum(1)
    distance = counts[:, None] + counts - 2 * (member @ member.T)
    at = int(counts.argmin())
    order = [at]
    for _ in range(len(member) - 1):
        distance[:, at] = torch.inf
        at = int(distance[at].argmin())
        order.append(at)
    chain, given = torch.tensor(order), torch.arange(len(order))
    return min(given, chain, key=lambda each: total_runs(spec, each))
