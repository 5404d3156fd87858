"""Generated portraits made of ovals: training images that need no data set.

Each is drawn on the device, at any size, from a few random numbers: a background gradient,
shoulders, hair, a face with eyes and a mouth. The parts of a portrait are correlated, so that
hidden patches can be predicted from visible ones.
"""

import torch
from torch import Tensor

# Width of the soft edges, as a share of the image's side.
_BLUR = 0.007


def portraits(count: int, size: int, generator: torch.Generator) -> Tensor:
    """[count, size, size, 3] in 0..1; the same for the same state of the generator."""
    device = generator.device
    centres = (torch.arange(size, device=device) + 0.5) / size
    y, x = centres[:, None], centres[None, :]

    def between(low: float, high: float) -> Tensor:
        numbers = torch.rand(count, 1, 1, generator=generator, device=device)
        return low + (high - low) * numbers

    def colour(low: float, high: float) -> Tensor:
        """A brightness common to the three channels, plus a tint."""
        tint = torch.rand(count, 1, 1, 3, generator=generator, device=device) - 0.5
        return (between(low, high)[..., None] + 0.35 * tint).clamp(0, 1)

    def oval(across: Tensor, down: Tensor, half_width: Tensor, half_height: Tensor) -> Tensor:
        """Coverage of each pixel, 1 inside and 0 outside, [count, size, size, 1]."""
        reach = (((x - across) / half_width) ** 2 + ((y - down) / half_height) ** 2).sqrt()
        distance = (1 - reach) * torch.minimum(half_width, half_height)
        return torch.sigmoid(distance / _BLUR)[..., None]

    def paint(picture: Tensor, where: Tensor, ink: Tensor) -> Tensor:
        return picture + where * (ink - picture)

    picture = paint(colour(0.3, 1.0), y[None, ..., None], colour(0.1, 0.8))
    across, down = between(0.42, 0.58), between(0.42, 0.54)
    width = between(0.17, 0.24)
    height = width * between(1.2, 1.45)
    skin, hair = colour(0.35, 0.9), colour(0.05, 0.6)
    shoulders = oval(across, down + 1.9 * height, 2.0 * width, height)
    picture = paint(picture, shoulders, colour(0.1, 0.9))
    picture = paint(picture, oval(across, down - 0.25 * height, 1.25 * width, height), hair)
    picture = paint(picture, oval(across, down, width, height), skin)
    eye, apart = colour(0.0, 0.4), between(0.38, 0.5) * width
    for side in (-1, 1):
        # Light from one side: one cheek is brighter.
        cheek = oval(across + side * apart, down + 0.25 * height, 0.3 * width, 0.2 * height)
        picture = paint(picture, cheek, (skin + 0.08 * side).clamp(0, 1))
        place = (across + side * apart, down - 0.12 * height)
        picture = paint(picture, oval(*place, 0.22 * width, 0.11 * height), skin * 0.3 + 0.7)
        picture = paint(picture, oval(*place, 0.1 * width, 0.1 * height), eye)
    smile = between(0.25, 0.5) * width, between(0.05, 0.12) * height
    mouth = oval(across, down + 0.5 * height, *smile)
    return paint(picture, mouth, colour(0.2, 0.5) * skin + 0.1)
