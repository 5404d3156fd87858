"""Chooses the course of a run by what the run names: a loss, a metric, or a work per token."""

from dataclasses import replace

from gaugelasso.compress.courses.course import Course
from gaugelasso.compress.courses.metric import MetricCourse
from gaugelasso.compress.courses.metric_target import MetricTarget
from gaugelasso.compress.courses.work import WorkCourse


def course_of(
    loss: float | None,
    metric: MetricTarget | None,
    fma: float,
    steps: int,
    lr: float,
    warmup: int = -1,
    anneal: int = -1,
    least_rate: float = -1.0,
) -> Course:
    """The course to a final loss or metric, or, where none is named, to a work per token."""
    lengths = (steps, lr, warmup, anneal, least_rate)
    if metric is not None:
        return MetricCourse(*lengths, goal=replace(metric, pairs=[]))
    if loss is None:
        return WorkCourse(*lengths, goal=fma)
    return Course(*lengths, named=loss)
