"""Prices in milliseconds: the table of a profile, and what follows from it."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gaugelasso import Compressor, CompressorOptions, Transformer, TransformerSpec, UserError
from gaugelasso.axes import named_tensors
from gaugelasso.compress.accountings import latency
from gaugelasso.compress.latency import Latency
from gaugelasso.compress.pricing import prices, total_fma
from gaugelasso.compress.time_table import TimeTable, Timing
from gaugelasso.training.trainer import Trainer
from tests.compress.tables import linear, table_for, written
from tests.examples import example
from tests.tiny import tiny

SPEC = TransformerSpec.uniform(
    width=32, layers=2, heads=2, d_k=16, d_v=16, d_f=48, length=6, inputs=9, outputs=9
)
MLP = "operators.mlp_0"


@pytest.fixture
def model() -> Transformer:
    return Transformer(SPEC)


def priced(model: Transformer, table: TimeTable) -> dict[str, np.ndarray]:
    return prices(model.axis_table(), Latency(table), named_tensors(model))


def total(model: Transformer, table: TimeTable) -> float:
    return total_fma(model.axis_table(), Latency(table), named_tensors(model))


# --- the table -------------------------------------------------------------------------------


def test_a_table_survives_its_file(model: Transformer, tmp_path: Path) -> None:
    table = table_for(model)
    read = TimeTable.read(written(table, tmp_path / "t.json"))
    assert read.to_dict() == table.to_dict()
    assert read.digest == table.digest
    assert total(model, read) == total(model, table)
    other = replace(table, circumstances=replace(table.circumstances, batch=2))
    assert other.digest != table.digest


DAMAGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "'format' is not": lambda data: data | {"format": "else"},
    "key 'hardware' is missing": lambda data: {k: v for k, v in data.items() if k != "hardware"},
    "unknown key profile.colour": lambda data: data | {"colour": "red"},
    "profile.batch = '1'": lambda data: data | {"batch": "1"},
    "mode = 'idle'": lambda data: data | {"mode": "idle"},
    "'operations' is not a list": lambda data: data | {"operations": {}},
    "with a 'kind'": lambda data: data | {"operations": [{}]},
    "'ms' is not a table of": lambda data: _first(data, ms=[1.0]),
    "positive numbers": lambda data: _first(data, ms=[0.0] * len(data["operations"][0]["ms"])),
    "do not ascend": lambda data: _first(data, sizes=[[8, 4]], ms=[1.0, 2.0]),
    "'multiples' = [0]": lambda data: _first(data, multiples=[0]),
    "'fixed' is not a list of whole numbers": lambda data: _first(data, fixed=[1.5]),
    "need an entry for each size": lambda data: _first(data, multiples=[1, 1]),
}


def _first(data: dict[str, Any], **changes: Any) -> dict[str, Any]:
    first, *rest = data["operations"]
    return data | {"operations": [first | changes, *rest]}


@pytest.mark.parametrize("message", DAMAGES)
def test_a_damaged_table_is_named(model: Transformer, tmp_path: Path, message: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps(DAMAGES[message](table_for(model).to_dict())))
    with pytest.raises(UserError) as refused:
        TimeTable.read(path)
    assert "t.json" in str(refused.value)
    assert message in str(refused.value)


@pytest.mark.parametrize("text", ["", "{", "[1]", "NaN", '{"format": 1, "format": 2}'])
def test_a_file_that_is_no_table_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(UserError, match=r"t\.json"):
        TimeTable.read(tmp_path / "t.json")
    with pytest.raises(UserError, match=r"none\.json': no such file; measure it with gaugelasso"):
        TimeTable.read(tmp_path / "none.json")


def test_noise_never_makes_more_work_faster() -> None:
    generator = np.random.default_rng(0)
    grid = (1, 4, 8, 16, 32)
    clean = np.array([[linear(a, b) for b in grid] for a in grid])
    noisy = clean * generator.uniform(0.7, 1.4, clean.shape)
    timing = Timing("read", (), (1, 1), (grid, grid), noisy)
    every = np.arange(1, 50)
    found = timing.at([every[:, None], every[None, :]])
    assert (np.diff(noisy, axis=0) < 0).any()
    assert (np.diff(found, axis=0) >= -1e-12).all()
    assert (np.diff(found, axis=1) >= -1e-12).all()


def test_times_are_those_of_the_grid_and_linear_between() -> None:
    timing = Timing("embed", (), (1,), ((2, 4, 8),), np.array([1.0, 2.0, 6.0]))
    assert [timing.at([size]) for size in (1, 2, 3, 4, 6, 8, 10)] == [1, 1, 1.5, 2, 4, 6, 8]
    assert timing.fewest == 1
    alone = Timing("read", (), (1, 1), ((4,), (2, 4)), np.array([[1.0, 3.0]]))
    assert alone.at([4, 3]) == alone.at([2, 3]) == 2


# --- prices ----------------------------------------------------------------------------------


def test_a_price_is_the_difference_that_the_table_says(model: Transformer) -> None:
    table = table_for(model)
    read, write = (table.find(kind, ()) for kind in ("gated read", "write"))
    found = priced(model, table)
    fixed = (read.fewest + write.fewest) / 3 / np.array([48, 32])
    filters = read.at([32, 48]) - read.at([32, 47]) + write.at([48, 32]) - write.at([47, 32])
    assert found[f"{MLP}.d_f"] == pytest.approx(np.full(48, filters + fixed[0]))
    inputs = read.at([32, 48]) - read.at([31, 48])
    assert found[f"{MLP}.d_mi"] == pytest.approx(np.full(32, inputs + fixed[1]))


def test_keys_have_no_share_in_the_removal_of_attention(model: Transformer) -> None:
    constant = table_for(model, lambda *sizes: 1.0)
    found = priced(model, constant)
    assert not found["operators.attention_0.d_k"].any()  # attention without keys still writes
    # All indices together are worth what goes with the operator: three operations.
    for kind in ("d_ai", "d_v", "d_ao"):
        assert found[f"operators.attention_0.{kind}"].sum() == pytest.approx(1)
    assert not found["classifier.d_c"].any()  # it can never go
    # A site is worth its indices: two reads and two writes of attention, and of MLPs.
    assert found["D"] == pytest.approx(np.full(32, 2 * 2 * (3 / 3 + 2 / 3) / 32))


def test_the_share_in_the_removal_does_not_grow_as_an_operator_shrinks(model: Transformer) -> None:
    constant = table_for(model, lambda *sizes: 1.0)
    before = priced(model, constant)[f"{MLP}.d_f"]
    narrow = TransformerSpec.uniform(
        width=32, layers=2, heads=2, d_k=16, d_v=16, d_f=6, length=6, inputs=9, outputs=9
    )
    assert priced(Transformer(narrow), constant)[f"{MLP}.d_f"] == pytest.approx(before[:6])


def test_no_price_is_negative_whatever_was_measured(model: Transformer) -> None:
    generator = np.random.default_rng(1)
    table = table_for(model, lambda *sizes: linear(*sizes) * generator.uniform(0.5, 2))
    assert all((price >= 0).all() for price in priced(model, table).values())


def test_prices_change_little_across_a_plateau(model: Transformer) -> None:
    """The cost has steps of 16, the price has none: it is the step divided by its width."""
    table = table_for(model, multiple=16, points=3)
    term = next(
        term
        for term in Latency(table).terms(model.axis_table(), named_tensors(model))
        if term.axes == (f"{MLP}.d_mi", f"{MLP}.d_f")
    )
    at = [{f"{MLP}.d_mi": 32, f"{MLP}.d_f": filters} for filters in range(16, 49)]
    work = np.array([term.work(widths) for widths in at])
    smooth = np.array([term.smooth(widths) for widths in at])
    assert (np.diff(work) > 0).sum() == 2
    assert work[1] == work[16] > work[0]
    assert np.diff(smooth)[:16] == pytest.approx((work[16] - work[0]) / 16)
    assert [*smooth[::16]] == pytest.approx([*work[::16]])


def test_widths_settle_on_the_multiples_of_the_table(tmp_path: Path) -> None:
    config = tiny(tmp_path)
    table = table_for(config.model.build(config.task, 3), multiple=4)
    path = written(table, tmp_path / "t.json")
    changes = {"compress__accounting": "latency", "compress__profile": str(path)}
    summary = Trainer(tiny(tmp_path, **changes), tmp_path / "run").run()
    free = Trainer(tiny(tmp_path), tmp_path / "free").run()
    grains = Latency(table).preferred(config.model.build(config.task, 3).axis_table())
    assert grains["operators.attention_0.d_k"] == 2  # pairs
    assert grains["operators.mlp_0.d_f"] == 4
    assert "D" not in grains
    assert any(free["widths"].get(name, 0) % each for name, each in grains.items())
    for name, each in grains.items():
        assert summary["widths"].get(name, 0) % each == 0


def test_pressing_lowers_the_milliseconds(tmp_path: Path) -> None:
    config = tiny(tmp_path)
    path = written(table_for(config.model.build(config.task, 3)), tmp_path / "t.json")
    changes = {"compress__accounting": "latency", "compress__profile": str(path)}
    summary = Trainer(tiny(tmp_path, **changes), tmp_path / "run").run()
    initial = json.loads((tmp_path / "run" / "initial.json").read_text())
    assert summary["fma_final"] < 0.8 * summary["fma_initial"]
    assert summary["costs"]["ms"] == summary["fma_final"]
    assert initial["costs"]["ms"] == summary["fma_initial"]
    assert "estimated, 1×6 tokens, float32" in summary["costs"]["ms_of"]
    for kind in ("fma", "bytes"):
        assert 0 < summary["costs"][kind] < initial["costs"][kind]


def test_a_removed_operator_takes_no_time(model: Transformer) -> None:
    table = table_for(model, lambda *sizes: 1.0)
    assert total(model, table) == 1 + 2 * (3 + 2) + 1
    compressor = Compressor(model, 1.0)  # for its table: widths of zero are those of a removal
    terms = Latency(table).terms(model.axis_table(), named_tensors(model))
    widths = compressor.widths | {f"{MLP}.{kind}": 0 for kind in ("d_mi", "d_f", "d_mo")}
    assert sum(float(term.work(widths)) for term in terms) == 1 + 2 * (3 + 2) + 1 - 2
    model.remove_operator("mlp_0")
    assert total(model, table) == 1 + 2 * (3 + 2) + 1 - 2


# --- what is refused -------------------------------------------------------------------------


def refused(model: Any, **options: Any) -> str:
    with pytest.raises(UserError) as error:
        Compressor(model, 1.0, CompressorOptions(accounting="latency", **options))
    return str(error.value)


def test_a_table_must_fit_the_model_and_the_device(model: Transformer, tmp_path: Path) -> None:
    table = table_for(model)
    assert "needs compress.profile" in refused(model)
    assert "no such file" in refused(model, profile=str(tmp_path / "none.json"))

    about = replace(table.circumstances, hardware="NVIDIA H200")
    path = str(written(replace(table, circumstances=about), tmp_path / "h200.json"))
    message = refused(model, profile=path)
    assert "measured on 'NVIDIA H200'" in message
    assert "compress.serving_device = 'NVIDIA H200'" in message
    assert "was measured on 'NVIDIA H200'" in refused(model, profile=path, serving_device="A100")
    options = CompressorOptions(profile=path, serving_device="NVIDIA H200", accounting="latency")
    assert latency(options, torch.device("cpu")) is not None
    assert Compressor(model, 1.0, options).fma == pytest.approx(total(model, table))

    some = [timing for timing in table.timings if timing.kind != "write"]
    path = str(written(replace(table, timings=tuple(some)), tmp_path / "some.json"))
    assert "no times of the operation 'write'" in refused(model, profile=path)

    path = str(written(table, tmp_path / "t.json"))
    heads = TransformerSpec.uniform(
        width=8, layers=1, heads=1, d_k=4, d_v=4, d_f=8, length=6, inputs=9, outputs=9
    )
    message = refused(Transformer(heads), profile=path)
    assert "'attention' with the numbers (1, 1, 1, 1) (it has (2, 2, 1, 1))" in message
    wide = TransformerSpec.uniform(
        width=128, layers=1, heads=2, d_k=4, d_v=4, d_f=8, length=6, inputs=9, outputs=9
    )
    assert "up to the sizes [32]" in refused(Transformer(wide), profile=path)
    own = example("your_model").Perceptron(8, 6, 3)
    assert "does not say what it does when it is served" in refused(own, profile=path)


def test_a_changed_table_does_not_resume(tmp_path: Path) -> None:
    config = tiny(tmp_path)
    table = table_for(config.model.build(config.task, 3))
    path = written(table, tmp_path / "t.json")
    changes: dict[str, Any] = {"compress__profile": str(path), "train__steps": 40}
    Trainer(tiny(tmp_path, **changes), tmp_path / "run").run()
    again = Trainer(tiny(tmp_path, **changes), tmp_path / "run", "resume")
    again.folder.close()
    written(table_for(config.model.build(config.task, 3), multiple=2), path)
    with pytest.raises(UserError, match=r"compress\.profile is not the one that the run began"):
        Trainer(tiny(tmp_path, **changes), tmp_path / "run", "resume")
