"""Masked autoencoder: see a few patches of an image, say what the hidden ones hold.

Patches of standardised pixels, most of them hidden behind a learned token; the loss is
the mean squared error on the hidden ones. Training goes through the images in an order of
its own every epoch, each flipped at random; held-out images keep their order and masks.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from gaugelasso.errors import UserError
from gaugelasso.models import InputKind
from gaugelasso.tasks import images
from gaugelasso.tasks.portraits import portraits
from gaugelasso.tasks.protocol import EVALUATION, Draw, Predict
from gaugelasso.tasks.stored import shuffled, to_device

GENERATED = "generated"
_SHOWN = 8


@dataclass(frozen=True)
class MaskedAutoencoder:
    path: str = GENERATED
    size: int = 128
    patch: int = 8
    masked: float = 0.75
    flip: bool = True
    pictures: bool = False

    metric_name: ClassVar[str] = "masked_mse"
    metric_lower_is_better: ClassVar[bool] = True
    input_kind: ClassVar[InputKind] = "masked_patches"
    causal: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for key in ("size", "patch"):
            if not 1 <= getattr(self, key) <= 4096:
                raise UserError(f"task.{key} = {getattr(self, key)}: must be 1 to 4096")
        if self.size % self.patch:
            raise UserError(
                f"task.patch = {self.patch} does not divide task.size = {self.size}: "
                "an image is cut into whole patches"
            )
        if not 0 < self.masked < 1 or not 0 < self.hidden < self.length:
            raise UserError(
                f"task.masked = {self.masked}: must hide some of the {self.length} patches and "
                "leave some visible"
            )
        if not self.path:
            raise UserError(
                "task.path is empty: give a packed .npz, a folder of images, 'generated' or "
                f"{images.CELEBA!r}"
            )

    @property
    def inputs(self) -> int:
        return 3 * self.patch**2

    @property
    def outputs(self) -> int:
        return self.inputs

    @property
    def length(self) -> int:
        return (self.size // self.patch) ** 2

    @property
    def hidden(self) -> int:
        """Masked patches of an image, the same number in all."""
        return round(self.masked * self.length)

    @property
    def has_end(self) -> bool:
        """Portraits are drawn without one."""
        return self.path != GENERATED

    def stored_data(self) -> dict[str, np.ndarray]:
        if self.path == GENERATED:
            return {}
        held = images.load(self.path, self.size)
        return {
            f"training images of {self.path!r}": held.parts["train"],
            f"validation images of {self.path!r}": held.parts["valid"],
            f"colours of {self.path!r}": np.array([held.mean, held.std]),
        }

    def batch(self, size: int, draw: Draw, device: str) -> tuple[Tensor, Tensor]:
        """Inputs [B, S, n + 1], hidden patches blank and marked; targets [B, S, n + 1], whole."""
        generator = torch.Generator(device).manual_seed(_seed(draw))
        if self.path == GENERATED:
            pixels = portraits(size, self.size, generator)
        else:
            pixels = self._stored(size, draw, device) / 255
        if self.flip and not draw.held_out:
            turned = torch.rand(size, 1, 1, 1, generator=generator, device=device) < 0.5
            pixels = torch.where(turned, pixels.flip(2), pixels)
        mean, std = _standard(self.path, self.size, device)
        patches = self.cut((pixels - mean) / std)
        chance = torch.rand(size, self.length, generator=generator, device=device)
        mask = torch.zeros_like(chance).scatter(1, chance.topk(self.hidden).indices, 1.0)[..., None]
        return torch.cat([patches * (1 - mask), mask], -1), torch.cat([patches, mask], -1)

    def _stored(self, size: int, draw: Draw, device: str) -> Tensor:
        """Images [B, h, w, 3] of the draw, sent without waiting for them."""
        part = images.load(self.path, self.size).parts["valid" if draw.held_out else "train"]
        places = np.arange(draw.index * size, (draw.index + 1) * size)
        if draw.held_out:
            chosen = places % len(part)
        else:
            chosen, _ = shuffled(places, len(part), draw.run)
        return to_device(part[chosen], device)

    def cut(self, pixels: Tensor) -> Tensor:
        """[B, h, w, 3] -> [B, S, n], patches row by row."""
        side, patch = self.size // self.patch, self.patch
        grid = pixels.view(-1, side, patch, side, patch, 3).transpose(2, 3)
        return grid.reshape(-1, self.length, self.inputs)

    def join(self, patches: Tensor) -> Tensor:
        """[B, S, n] -> [B, h, w, 3], the inverse of `cut`."""
        side, patch = self.size // self.patch, self.patch
        grid = patches.view(-1, side, side, patch, patch, 3).transpose(2, 3)
        return grid.reshape(-1, self.size, self.size, 3)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        patches, mask = targets[..., :-1], targets[..., -1:]
        error = (outputs.float() - patches).square() * mask
        # Every image hides as many.
        return error.sum() / (len(targets) * self.hidden * self.inputs)

    def metric(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.loss(outputs, targets)

    def whole_figures(self, predict: Predict, size: int, device: str) -> dict[str, float]:
        """Error over every held-out image once, behind the masks that it has in `batch`."""
        count = len(images.load(self.path, self.size).parts["valid"])
        total = torch.zeros((), device=device, dtype=torch.float64)
        for index in range(math.ceil(count / size)):
            # The last batch goes on with the first images: those have been counted.
            new = min(size, count - index * size)
            inputs, targets = self.batch(size, Draw(0, index, EVALUATION), device)
            total += new * self.loss(predict(inputs[:new]), targets[:new]).double()
        loss = float(total / count)
        return {"loss": loss, self.metric_name: loss}

    def samples(self, outputs: Tensor, targets: Tensor) -> Mapping[str, Tensor]:
        """Original, masked and reconstructed images; of users' images only if they ask."""
        if self.path != GENERATED and not self.pictures:
            return {}
        patches, mask = targets[:_SHOWN, :, :-1], targets[:_SHOWN, :, -1:]
        mean, std = _standard(self.path, self.size, str(targets.device))

        def seen(rows: Tensor) -> Tensor:
            return ((self.join(rows) * std + mean).clamp(0, 1) * 255).round().byte()

        guessed = torch.lerp(patches, outputs[:_SHOWN].float(), mask)
        return {
            "original": seen(patches),
            "masked": seen(patches * (1 - mask)),
            "reconstructed": seen(guessed),
        }


def _seed(draw: Draw) -> int:
    """Held-out draws leave out the run: every run is measured on the same images and masks."""
    return Draw(0, draw.index, draw.stream).seed if draw.held_out else draw.seed


@functools.lru_cache(maxsize=8)
def _standard(path: str, size: int, device: str) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each colour over the training images, on the device."""
    if path == GENERATED:
        sample = portraits(512, 16, torch.Generator().manual_seed(0)).flatten(0, 2)
        mean, std = sample.mean(0), sample.std(0)
    else:
        held = images.load(path, size)
        mean, std = torch.tensor(held.mean), torch.tensor(held.std)
    return mean.to(device), std.to(device)
