"""A model with its loss as one module, for training code that wants the loss from the model."""

from collections.abc import Callable

from torch import Tensor, nn

from gaugelasso.errors import UserError


class LossModel(nn.Module):
    """Calls `model` on `inputs`, and `loss(outputs, labels)` where there are labels.

    `model` is the one that the compressor is given. Its `forward` takes one tensor.
    """

    def __init__(self, model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]):
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """The key `logits`, and with labels `loss`."""
        logits = self.model(inputs)
        if labels is None:
            return {"logits": logits}
        return {"loss": self.loss(logits, labels), "logits": logits}


def loss_of(outputs: object) -> Tensor | None:
    """The loss among the outputs of a model, as the Trainer of transformers finds it.

    A dict has it under `loss`, a tuple first; or it is the output. None where nothing is a loss.
    """
    if isinstance(outputs, dict):
        outputs = outputs.get("loss")
    elif isinstance(outputs, tuple | list) and outputs:
        outputs = outputs[0]
    return outputs if isinstance(outputs, Tensor) and outputs.numel() == 1 else None


def check_parts(module: nn.Module, trained: nn.Module) -> None:
    """UserError unless `trained` is a part of the module, and has all of its parameters."""
    if all(part is not trained for part in module.modules()):
        raise UserError(
            f"the {type(trained).__name__} of the compressor is no part of the "
            f"{type(module).__name__}; give LossModel and Compressor the same model"
        )
    own = {id(parameter) for parameter in trained.parameters()}
    for name, parameter in module.named_parameters():
        if id(parameter) not in own:
            raise UserError(
                f"parameter {name!r} of the {type(module).__name__} is not in the "
                f"{type(trained).__name__} of the compressor, so nothing would train it; make it "
                "a part of that model, or a buffer"
            )
