"""Chooses the course of a run by what the run names: a loss, a metric, or a work per token."""

import math
from dataclasses import replace

from gaugelasso.compress.courses.course import Course
from gaugelasso.compress.courses.metric import MetricCourse
from gaugelasso.compress.courses.metric_target import MetricTarget
from gaugelasso.compress.courses.pretrained import PretrainedCourse
from gaugelasso.compress.courses.scheduled import ScheduledCourse
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
    by_harm: bool = False,
) -> Course:
    """The course to a final loss, metric or both, or, where none is named, to a work per token.

    `by_harm`: channels go by their measured harm, and there is no pressure.
    """
    lengths = (steps, lr, warmup, anneal, least_rate)
    if metric is not None:
        bound = min(metric.loss, math.inf if loss is None else loss)
        goal = replace(metric, pairs=[], loss=bound)
        return MetricCourse(*lengths, goal=goal, by_harm=by_harm)
    if loss is None:
        work_course = ScheduledCourse if by_harm else WorkCourse
        return work_course(*lengths, goal=fma, by_harm=by_harm)
    return (PretrainedCourse if by_harm else Course)(*lengths, named=loss, by_harm=by_harm)
