"""The check of models that are rebuilt from their structure, and trained; its report."""

import torch
from torch import Tensor

import gaugelasso
from gaugelasso import Slot
from tests.checking.cases import Net, only_failure, report
from tests.examples import example

# --- rebuilding --------------------------------------------------------------------------


def test_a_constant_of_the_first_width_that_the_structure_does_not_hold() -> None:
    class Scaled(Net):
        def __init__(self, hidden: int = 8) -> None:
            super().__init__(hidden)
            self.scale = hidden**-0.5

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    message = only_failure(Scaled(), "rebuild")
    assert message.startswith("hidden: a cut model that from_structure(structure()) builds has")
    assert "a scale that the constructor computes from a width" in message


def test_a_buffer_holds_such_a_constant() -> None:
    """Also one that `state_dict` leaves out: a checkpoint has every buffer."""

    class Scaled(Net):
        fixed = (*Net.fixed, Slot("scale"))

        def __init__(self, hidden: int = 8) -> None:
            super().__init__(hidden)
            self.register_buffer("scale", torch.tensor([hidden**-0.5]), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    result = report(Scaled())
    assert result.passed, str(result)
    assert "rebuild" in {finding.check for finding in result.findings}


def test_a_structure_that_does_not_follow_a_cut() -> None:
    class Stale(Net):
        def structure(self) -> dict:
            return {"hidden": 8}

    message = only_failure(Stale(), "rebuild")
    assert "has lost indices of this axis" in message
    assert "structure() must describe every width" in message


def test_a_model_that_is_never_rebuilt_gets_a_note() -> None:
    class Plain(Net):
        def structure(self) -> dict:
            return {"units": self.up.shape[1]}

    result = report(Plain())
    assert result.passed
    (note,) = (finding for finding in result.findings if finding.level == "note")
    assert note.check == "rebuild"
    assert "unexpected keyword argument 'units'" in note.message


# --- training ----------------------------------------------------------------------------


def test_a_training_that_ends_in_nan() -> None:
    class Root(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + (0 * self.bias.sum().sqrt() if self.training else 0)

    assert "NaN or infinite in step" in only_failure(Root(), "training")


def test_a_training_that_fails() -> None:
    class Fragile(Net):
        def forward(self, x: Tensor) -> Tensor:
            if self.training and self.up.shape[1] < 4:
                raise RuntimeError("too narrow")
            return super().forward(x)

    message = only_failure(Fragile(), "training")
    assert "RuntimeError: too narrow" in message
    assert "at the widths {'hidden': " in message


def test_passes_are_one_row_and_failures_are_each_one() -> None:
    module = example("encoder")
    rows = gaugelasso.check(module.build(), module.batch(2), module.loss, steps=20).rows()
    assert len([row for row in rows if row[0] == "gauge"]) == 1
    assert rows[1][:3] == ("gauge", "pass", "15 axes")
