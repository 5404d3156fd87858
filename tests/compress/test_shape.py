"""Stock shapes: layers stay alike, and operators read and write the whole stream."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gaugelasso.axes import AxisError, named_tensors
from gaugelasso.compress.compressor import Compressor, CompressorOptions
from gaugelasso.compress.ranking import Ranking
from gaugelasso.errors import UserError
from gaugelasso.models import Transformer, TransformerSpec
from gaugelasso.runs.checkpoint import load_model
from tests.compress.small_retrieval import model
from tests.compress.test_harm import trained
from tests.tiny_runs import assert_same_run, finished, killed, outcome, rows, start


def compressor(network: Transformer | None = None, **options: Any) -> Compressor:
    given = {"lr": 1e-9, "removal": "harm", "shape": "llama", "interval": 1000} | options
    made = Compressor(network or model(), 100.0, CompressorOptions(**given))
    made.model.train()
    return made


def ranking(made: Compressor, **raised: float) -> Ranking:
    """By measured harm; `raised` multiplies the harms of the axes of a kind."""
    assert made.state.harm is not None
    scores = made.state.harm.by_axis()
    for axis in made.state.table.axes:
        scores[axis.name] = scores[axis.name] * raised.get(axis.kind, 1.0)
    return Ranking(made.state, scores, {name: each < 0 for name, each in scores.items()})


def assert_stock(spec: TransformerSpec) -> None:
    """Everything reads and writes all sites in order, and layers have equal widths."""
    places = tuple(range(len(spec.sites)))
    assert spec.embed == places
    assert spec.classify == places
    assert all(op.reads == op.writes == places for op in spec.operators)
    for kind in {type(op) for op in spec.operators}:
        alike = [op for op in spec.operators if type(op) is kind]
        widths = ("filters",) if hasattr(alike[0], "filters") else ("keys", "values", "heads")
        for width in widths:
            assert len({getattr(op, width) for op in alike}) == 1


def cut_to(made: Compressor, share: float, **raised: float) -> TransformerSpec:
    order = ranking(made, **raised)
    decision = order.closed(order.keeps(order.number_to(share * made.state.fma)))
    assert decision is not None
    made.state.cut_(decision, "in a test")
    network = made.model
    assert isinstance(network, Transformer)
    return network.spec()


@pytest.mark.parametrize("share", [0.9, 0.6, 0.3])
def test_a_cut_leaves_layers_alike(share: float) -> None:
    made = trained(compressor(), 2)
    before = made.state.fma
    spec = cut_to(made, share)
    assert_stock(spec)
    assert made.state.fma <= share * before
    keys = {(op.keys, op.values) for op in spec.operators if hasattr(op, "keys")}
    assert keys <= {(3, 5)}  # 3 pairs; heads are not touched


@pytest.mark.parametrize("share", [0.9, 0.6, 0.3])
def test_widths_are_multiples_in_all_layers(share: float) -> None:
    made = trained(compressor(multiple=4), 2)
    spec = cut_to(made, share)
    assert_stock(spec)
    assert len(spec.sites) % 4 == 0
    assert {op.filters % 4 for op in spec.operators if hasattr(op, "filters")} == {0}


def test_a_hook_that_keeps_an_index_keeps_its_unit() -> None:
    """One filter of one layer stays, so one of every layer does; a site stays everywhere."""
    made = trained(compressor(), 3)
    order = ranking(made)
    keeps = order.keeps(len(order) // 2)
    names = [axis.name for axis in made.state.table.axes if axis.kind == "d_f"]
    first = next(name for name in names if not keeps[name].all())
    keeps[first][int((~keeps[first]).nonzero()[0])] = True
    decision = order.closed(keeps)
    assert decision is not None
    assert len({int(decision.keeps[name].sum()) for name in names}) == 1
    made.state.cut_(decision, "in a test")
    assert_stock(made.model.spec())  # type: ignore[attr-defined]


def test_hooks_do_not_break_the_shape() -> None:
    made = compressor(interval=2, lr=1e-3)

    @made.on_drop
    def only_some(drop: Any) -> Any:
        return drop.indices[::2] if drop.axis.endswith("d_f") else None

    trained(made, 12)
    assert made.state.fma < made.history[0].fma_before
    assert_stock(made.model.spec())  # type: ignore[attr-defined]


def test_equally_many_filters_go_in_each_layer_those_of_the_least_harm() -> None:
    made = trained(compressor(), 3)
    assert made.state.harm is not None
    names = [axis.name for axis in made.state.table.axes if axis.kind == "d_f"]
    harms = {name: made.state.harm.by_axis()[name] for name in names}
    order = ranking(made, D=1e9, d_k=1e9, d_v=1e9)
    for number in (1, 5, len(order) // 2):
        keeps = order.keeps(number)
        assert [int((~keeps[name]).sum()) for name in names] == [number] * 2
        for name in names:
            going = ~keeps[name]
            assert harms[name][going].max() <= harms[name][keeps[name]].min()


def test_sites_go_with_all_that_reads_and_writes_them() -> None:
    made = trained(compressor(), 2)
    spec = cut_to(made, 0.8, d_f=1e9, d_v=1e9)
    assert len(spec.sites) < 12
    assert len(spec.operators) == 4
    assert_stock(spec)
    for name, tensor in named_tensors(made.model).items():
        if name.endswith("read.weight"):
            assert torch.equal(tensor, torch.full_like(tensor, 1 / len(spec.sites)))


def test_a_layer_goes_as_a_whole() -> None:
    made = trained(compressor(model(layers=3)), 2)
    second = made.state.table.layers[1]
    assert made.state.harm is not None
    scores = made.state.harm.by_axis()
    for axis in made.state.table.axes:
        scores[axis.name] = scores[axis.name] * (1e-9 if axis.owner in second else 1.0)
    order = Ranking(made.state, scores, {name: each < 0 for name, each in scores.items()})
    decision = order.closed(order.keeps(1))
    assert decision is not None
    assert set(decision.removed) == set(second)
    made.state.cut_(decision, "in a test")
    assert len(made.state.table.layers) == 2
    assert_stock(made.model.spec())  # type: ignore[attr-defined]


def test_the_last_layer_stays() -> None:
    made = trained(compressor(model(layers=1)), 2)
    spec = cut_to(made, 0.05)
    assert len(spec.operators) == 2
    assert_stock(spec)


@pytest.mark.parametrize("layers", [2, 3])
def test_all_but_one_layer_may_go_at_once(layers: int) -> None:
    made = trained(compressor(model(layers=layers)), 2)
    spec = cut_to(made, 0.0, D=1e9)
    assert len(spec.operators) == 2
    assert_stock(spec)
    ranking(made)  # and there is an order of what is left


def test_a_run_ends_in_the_shape_and_resumes_exactly(tmp_path: Path) -> None:
    changes = {"compress__removal": "harm", "compress__shape": "llama"}
    whole = finished(tmp_path, "whole", **changes)
    assert outcome(whole)["fma_final"] < 0.95 * outcome(whole)["fma_initial"]
    network = load_model(whole)
    assert isinstance(network, Transformer)
    assert_stock(network.spec())
    cuts = [row["step"] for row in rows(whole, "events.jsonl") if row["dropped"]]
    broken = killed(tmp_path, cuts[0] + 3, "killed", **changes)
    start(broken.parent, "killed", existing="resume", **changes).run()
    assert_same_run(whole, broken)


# --- mistakes ---------------------------------------------------------------------------------


def test_pressure_has_no_stock_shape() -> None:
    with pytest.raises(
        UserError,
        match=r"compress\.shape = 'llama'.* use compress\.removal = 'harm', or compress\.shape",
    ):
        CompressorOptions(shape="llama", removal="pressure")
    with pytest.raises(UserError, match="choose one of: free, llama"):
        CompressorOptions(shape="bert", removal="harm")


def test_a_model_whose_layers_differ_is_refused() -> None:
    made = trained(compressor(shape="free"), 2)
    name = next(axis.name for axis in made.state.table.axes if axis.kind == "d_f")
    keeps = {each: torch.ones(size, dtype=torch.bool) for each, size in made.state.widths().items()}
    keeps[name][0] = False
    order = ranking(made)
    decision = order.closed(keeps)
    assert decision is not None
    made.state.cut_(decision, "in a test")
    with pytest.raises(UserError, match=r"layers must be alike, and .* has 15 .* has 16"):
        compressor(made.model)  # type: ignore[arg-type]
    made.model.remove_operator("operators.mlp_0")
    with pytest.raises(UserError, match="1 of the 2 layers have a d_f"):
        compressor(made.model)  # type: ignore[arg-type]


def test_normalisers_that_are_no_plain_means_are_refused() -> None:
    network = model()
    with torch.no_grad():
        named_tensors(network)["operators.mlp_0.read.weight"][0] *= 2
    with pytest.raises(UserError, match=r"plain mean .* 'operators\.mlp_0\.read\.weight' differ"):
        compressor(network)


def test_an_operator_that_reads_a_part_of_the_stream_is_refused() -> None:
    spec = model().spec()
    first = replace(spec.operators[0], reads=spec.operators[0].reads[1:])
    others = [replace(each, reads=first.reads) for each in spec.operators[2::2]]
    operators = list(spec.operators)
    operators[0], operators[2::2] = first, others
    with pytest.raises(UserError, match=r"the whole stream of 12 sites, and .*d_ai' has 11"):
        compressor(Transformer(replace(spec, operators=tuple(operators))))


def test_layers_name_owners() -> None:
    network = model()
    table = replace(network.axis_table(), layers=(("operators.mlp_0", "operators.mlp_9"),))
    with pytest.raises(AxisError, match=r"layers: no axis is owned by 'operators\.mlp_9'"):
        table.check(named_tensors(network))


def test_norms_of_heads_stay_as_they_are() -> None:
    """A stock shape resets normalisers to plain means; no key channel of a head has gone."""
    spec = replace(model().initial_spec, qk_norm=True)
    made = trained(compressor(Transformer(spec, 1)), 2)
    cut = cut_to(made, 0.6)
    assert_stock(cut)
    assert len(cut.sites) < len(spec.sites)
    norms = [each for each in made.state.table.norms if "_norm." in each.weight]
    assert norms
    tensors = named_tensors(made.model)
    for norm in norms:
        weight = tensors[norm.weight]
        assert torch.equal(weight, torch.full_like(weight, 1 / len(weight)))
    fresh = Transformer(cut, 1)
    assert fresh.initial_spec.qk_norm
    weights = {name: each for name, each in named_tensors(fresh).items() if name in tensors}
    assert all(torch.equal(tensors[norm.weight], weights[norm.weight]) for norm in norms)
