"""A sound model passes the check; each seeded mistake is a failure that says what to change."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gaugelasso
from gaugelasso import Axis, AxisTable, Compressible, Cost, Slot
from gaugelasso.models import Transformer, TransformerSpec
from tests.checking.cases import Net, only_failure, report
from tests.examples import example

# --- sound models ------------------------------------------------------------------------


def test_the_perceptron_passes_and_is_not_changed() -> None:
    model = Net()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    result = report(model)
    assert result.passed, str(result)
    assert {finding.check for finding in result.findings} == {
        "table", "gauge", "zero", "rebuild", "cost", "training"
    }  # fmt: skip
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_the_encoder_passes() -> None:
    module = example("encoder")
    torch.manual_seed(0)
    model = module.Encoder.uniform(width=6, layers=1, d_k=3, hidden=5)
    result = gaugelasso.check(model, module.batch(4), module.loss)
    assert result.passed, str(result)


@pytest.mark.parametrize("qwen3", [False, True])
def test_the_transformer_passes(qwen3: bool) -> None:
    spec = TransformerSpec.uniform(
        width=6, layers=1, heads=2, d_k=4, d_v=4, d_f=5, length=5, inputs=7, outputs=7
    )
    if qwen3:
        attention = replace(spec.operators[0], window=3)
        spec = replace(spec, qk_norm=True, eps=0.01, operators=(attention, spec.operators[1]))
    tokens = torch.randint(7, (3, 5), generator=torch.Generator().manual_seed(0))
    result = gaugelasso.check(Transformer(spec), (tokens, tokens))
    assert result.passed, str(result)


class Stock(Compressible):
    """The filters of a layer of torch, which computes it in one piece in evaluation."""

    def __init__(self, hidden: int = 8):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.TransformerEncoderLayer(6, 2, hidden, 0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def axis_table(self) -> AxisTable:
        up = (Slot("layer.linear1.weight", 0), Slot("layer.linear1.bias", 0))
        down = (Slot("layer.linear2.weight", 1),)
        used = {(slot.tensor, slot.dim) for slot in (*up, *down)}
        return AxisTable(
            (Axis("hidden", "hidden", up, down, owner="mlp", silences=False),),
            tuple(
                Slot(name, dim)
                for name, parameter in self.named_parameters()
                for dim in range(parameter.dim())
                if (name, dim) not in used
            ),
            matrices={up[0].tensor: 1, down[0].tensor: 1},
            # Maps of queries, keys, values and results, scores and mix; then the filters.
            costs=(Cost("matmul", 4 * 36 + 2 * 6 * 5, ()), Cost("matmul", 12, ("hidden",))),
            required=frozenset({"mlp"}),
            context=(5, 5.0),
        )

    def structure(self) -> dict:
        return {"hidden": len(self.layer.linear1.weight)}


def test_a_layer_that_torch_fuses_in_evaluation_is_counted() -> None:
    batch = torch.randn(3, 5, 6, generator=torch.Generator().manual_seed(0))
    before = torch.backends.mha.get_fastpath_enabled()
    result = gaugelasso.check(Stock(), (batch, batch), F.mse_loss)
    assert result.passed, str(result)
    assert torch.backends.mha.get_fastpath_enabled() is before


# --- the declaration ---------------------------------------------------------------------


def test_a_forgotten_dim() -> None:
    class Forgotten(Net):
        fixed = (Slot("up", 0),)

    assert "tensor 'down' dim 1 (size 3) is on no axis" in only_failure(Forgotten(), "table")


def test_the_second_name_of_a_tied_tensor() -> None:
    class Tied(Net):
        fixed = (*Net.fixed, Slot("again", 0))

        def __init__(self) -> None:
            super().__init__()
            self.again = self.down

    assert "tied to 'down', so use that name" in only_failure(Tied(), "table")


def test_a_forward_pass_that_is_random_converts_or_fails() -> None:
    class Random(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + torch.rand(3)

    class Single(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).float()

    assert "two calls in eval mode differ" in only_failure(Random(), "table")
    assert "torch.float32" in only_failure(Single(), "table")
    result = report(Net(), (torch.ones(2, 5), torch.ones(2, 3)))
    assert "the forward pass fails on the batch" in result.failures[0].message


def test_an_axis_without_a_price_is_noted() -> None:
    class Free(Net):
        axis = replace(Net.axis, riders=(Slot("bias", power=1), Slot("spare", power=1)))

        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Parameter(torch.ones(8))

        def axis_table(self) -> AxisTable:
            table = super().axis_table()
            riders = (Slot("bias", power=1),)
            spare = Axis("spare", "spare", (Slot("spare"),), (Slot("more"),))
            axes = (replace(self.axis, riders=riders), spare)
            return replace(table, axes=axes)

    model = Free()
    model.more = nn.Parameter(torch.ones(8))
    findings = report(model).findings
    notes = [each for each in findings if each.level == "note" and each.check == "table"]
    assert [note.subject for note in notes] == ["spare"]
    assert "no cost names this axis" in notes[0].message


# --- gauge -------------------------------------------------------------------------------


def test_a_wrong_power() -> None:
    class Wrong(Net):
        axis = replace(Net.axis, riders=(Slot("bias"),))

    message = only_failure(Wrong(), "gauge")
    assert "hidden: " in message
    assert "rider Slot('bias', 0) has power=0, and power=1 is exact" in message


class Gained(Net):
    """down(gain relu(up x + bias)); the gain belongs on side B, or is a rider."""

    costs = (Cost("matmul", 9, ("hidden",)),)

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return (F.relu(x @ self.up + self.bias) * self.gain) @ self.down


def test_a_slot_on_a_side_that_is_a_rider() -> None:
    class Wrong(Gained):
        axis = replace(Net.axis, side_a=(Slot("up", 1), Slot("gain")))

    message = only_failure(Wrong(), "gauge")
    assert "Slot('gain', 0) is on side_a, but is a rider with power=0" in message


def test_a_slot_on_the_wrong_side() -> None:
    class Wrong(Net):
        axis = replace(Net.axis, side_b=(Slot("down"), Slot("bias")), riders=())

    message = only_failure(Wrong(), "gauge")
    assert "Slot('bias', 0) is on side_b and belongs on side_a" in message


def test_a_missing_rider_of_a_linked_axis() -> None:
    class Forgetful(example("encoder").Encoder):
        def axis_table(self) -> AxisTable:
            table = super().axis_table()
            stream = table["stream"]
            riders = tuple(s for s in stream.riders if s.tensor != "leave.weight")
            axes = (*table.axes[:-1], replace(stream, riders=riders))
            return replace(table, axes=axes)

    module = example("encoder")
    torch.manual_seed(0)
    uniform = module.Encoder.uniform(width=5, layers=1, d_k=2, hidden=3)
    model = Forgetful(uniform.structure())
    result = gaugelasso.check(model, module.batch(3), module.loss, steps=5)
    (failure,) = (finding for finding in result.failures if finding.check == "gauge")
    assert failure.subject == "stream"
    assert "Slot('leave.weight', 0, link='leave.sites') must follow with power=-2" in (
        failure.message
    )


def test_a_relu_is_not_linear() -> None:
    class Wrong(Net):
        axis = Axis(
            "hidden", "hidden", (Slot("up", 1), Slot("bias")), (Slot("down"),), owner="net",
            growth="linear",
        )  # fmt: skip

    message = only_failure(Wrong(), "growth")
    assert "the axis is not linear; declare growth='permutation'" in message


def test_a_width_that_is_not_read_from_a_shape_fails_to_grow() -> None:
    class Wrong(Net):
        axis = replace(Net.axis, growth="permutation")

        def forward(self, x: Tensor) -> Tensor:
            assert self.up.shape[1] <= 8
            return super().forward(x)

    assert "the model fails with one more index: AssertionError" in only_failure(Wrong(), "growth")


class Gelu(Net):
    activation = staticmethod(F.gelu)


def test_a_gelu_between_the_sides() -> None:
    assert "declare gauge=False" in only_failure(Gelu(), "gauge")


def test_a_gelu_declared_without_gauge_passes() -> None:
    class Declared(Gelu):
        axis = Axis(
            "hidden", "hidden", (Slot("up", 1), Slot("bias")), (Slot("down"),), owner="net",
            gauge=False,
        )  # fmt: skip

    assert report(Declared()).passed


def test_an_axis_that_gives_up_its_gauge_is_noted() -> None:
    class Shy(Net):
        axis = replace(Net.axis, side_a=(Slot("up", 1), Slot("bias")), riders=(), gauge=False)

    result = report(Shy())
    assert result.passed
    assert any("leave out gauge=False" in f.message for f in result.findings if f.level == "note")


# --- zero, then drop ---------------------------------------------------------------------


def test_a_rider_that_contributes_alone() -> None:
    class Offset(Net):
        axis = replace(Net.axis, riders=(Slot("bias", power=1), Slot("offset")))

        def __init__(self) -> None:
            super().__init__()
            self.offset = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.offset.sum()

    message = only_failure(Offset(), "zero")
    assert "rider Slot('offset', 0) still contributes when both sides are zero" in message


def test_a_norm_over_the_indices() -> None:
    class Normed(Net):
        axis = replace(Net.axis, side_a=(Slot("up", 1), Slot("bias")), riders=(), gauge=False)

        def forward(self, x: Tensor) -> Tensor:
            return F.layer_norm(x @ self.up + self.bias, self.bias.shape) @ self.down

    assert "SlowNorm" in only_failure(Normed(), "zero")


def test_a_width_that_is_kept_in_an_attribute() -> None:
    class Remembered(Net):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = 8

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 0 * self.bias.view(self.hidden).sum()

    result = report(Remembered())
    (zero,) = (finding for finding in result.failures if finding.check == "zero")
    assert "read every width from a tensor's shape" in zero.message


def test_a_bias_after_an_axis_that_should_silence_its_owner() -> None:
    class Biased(Net):
        required = frozenset()
        fixed = (*Net.fixed, Slot("after"))

        def __init__(self) -> None:
            super().__init__()
            self.after = nn.Parameter(torch.zeros(3))
            self.gone = False

        def forward(self, x: Tensor) -> Tensor:
            return x.new_zeros(len(x), 3) if self.gone else super().forward(x) + self.after

        def axis_table(self) -> AxisTable:
            return AxisTable(()) if self.gone else super().axis_table()

        def remove_operator(self, name: str) -> None:
            self.gone = True
            del self.up, self.bias, self.down, self.after

    result = report(Biased())
    (zero,) = (finding for finding in result.failures if finding.check == "zero")
    assert "'net' still writes when the axis is empty" in zero.message
    assert "silences=False" in zero.message


# --- costs -------------------------------------------------------------------------------


def test_a_wrong_factor_and_a_forgotten_constant() -> None:
    class Wrong(Net):
        costs = (Cost("matmul", 7, ("hidden",)),)

    class Constant(Net):
        fixed = (*Net.fixed, Slot("last", 0), Slot("last", 1))

        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Parameter(torch.eye(3))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) @ self.last

    result = report(Wrong())
    assert [finding.subject for finding in result.failures] == ["hidden", "total"]
    assert "saves 9 FMA per token by count, and 7 by the table" in result.failures[0].message
    assert "Cost('matmul', 9, ())" in only_failure(Constant(), "cost")
