"""The command profile: what it measures, and the table that it writes."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from gaugelasso import Transformer
from gaugelasso.axes import named_tensors
from gaugelasso.bench import profile as measuring
from gaugelasso.bench.operations import actions
from gaugelasso.bench.profile import Profile, estimate, grid, plateau
from gaugelasso.cli import profiles
from gaugelasso.compress.latency import Latency
from gaugelasso.compress.time_table import TimeTable
from gaugelasso.config import activations
from gaugelasso.models import SpecError
from gaugelasso.report.timing import apart
from tests.command import Command, assert_user_error
from tests.compress.test_latency import SPEC
from tests.contract.models import make
from tests.inference.cases import CASES, GENERATIVE
from tests.tiny import tiny, write_tiny


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "_SHARES", (1.0, 0.0))
    monkeypatch.setattr(measuring, "_CPU_PLATEAUS", ())
    monkeypatch.setattr(measuring, "_MOST", 3)


@pytest.mark.parametrize("decode", [False, True])
def test_every_operation_of_a_model_is_measured(decode: bool) -> None:
    model = Transformer(SPEC).eval()
    tokens = torch.zeros(2, 5, dtype=torch.long)
    table = Profile(model, tokens, torch.float32, decode=decode).measure()
    assert {timing.kind for timing in table.timings} == {
        "embed", "read", "gated read", "attention", "write",
    }  # fmt: skip
    terms = Latency(table).terms(model.axis_table(), named_tensors(model))
    assert len(terms) == 1 + 2 * (3 + 2) + 1
    assert estimate(model, table) == pytest.approx(
        sum(float(term.work(model.axis_table().widths(named_tensors(model)))) for term in terms)
    )
    about = table.circumstances
    assert (about.batch, about.length, about.dtype, about.device) == (2, 5, "float32", "cpu")
    assert about.mode == ("decode" if decode else "forward")
    assert about.threads == torch.get_num_threads()


@pytest.mark.parametrize("case", [c for c in CASES if c.seed == 0 and c.dropped], ids=str)
def test_every_kind_of_transformer_can_be_measured(case: object) -> None:
    """Patches and tokens, with and without RoPE, positions, grouped keys, after drops."""
    model = make(case).float().eval()  # type: ignore[arg-type]
    spec = model.initial_spec
    inputs = torch.zeros(1, spec.length, dtype=torch.long)
    if spec.input_kind != "tokens":
        inputs = torch.zeros(1, spec.length, model.embedding.table.shape[0])
    measured = Profile(model, inputs, torch.float32)
    assert estimate(model, measured.measure()) > 0
    if case in GENERATIVE:
        return
    with pytest.raises(SpecError, match="cannot generate tokens"):
        Profile(model, inputs, torch.float32, decode=True)


def test_an_operation_computes_what_is_served() -> None:
    """The forms of one operation agree: each is the real code on the same values."""
    torch.manual_seed(0)
    setting = Profile(Transformer(SPEC).eval(), torch.zeros(1, 6, dtype=torch.long), torch.float32)
    for kind, sizes in (("read", (20, 7)), ("gated read", (20, 7)), ("gelu read", (20, 7))):
        with torch.inference_mode():
            one, *others = (way() for way in actions(setting.setting, kind, (), sizes).values())
        for other in others:
            assert isinstance(one, torch.Tensor)
            assert one.shape == (6, 7)
            torch.testing.assert_close(one, other)


def test_sizes_are_padded_as_on_a_gpu() -> None:
    model = Transformer(SPEC).eval()
    measured = Profile(model, torch.zeros(2, 5, dtype=torch.long), torch.float32)
    measured.setting = replace(measured.setting, align=16, order="sites")
    table = measured.measure()
    for timing in table.timings:
        padding = 8 if timing.kind == "attention" else 16
        assert set(timing.multiples) == {padding}
        assert all(size % padding == 0 for grid in timing.sizes for size in grid)
    grains = Latency(table).preferred(model.axis_table())
    attention = {kind: grains[f"operators.attention_0.{kind}"] for kind in ("d_ai", "d_k", "d_v")}
    assert attention == {"d_ai": 16, "d_k": 4, "d_v": 8}  # pairs of keys
    assert grains["operators.mlp_0.d_f"] == grains["classifier.d_c"] == 16
    assert estimate(model, table) > 0


def test_grids_hold_multiples_up_to_the_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "_SHARES", (1.0, 0.5, 0.25, 0.0))
    assert grid(48, 1) == (1, 12, 24, 48)
    assert grid(40, 16) == (16, 32, 48)
    assert grid(1, 1) == (1,)


def test_a_plateau_is_found_where_times_have_steps() -> None:
    points = range(64, 129)
    noise = np.random.default_rng(0).normal(0, 0.01, len(points))
    steps = np.ceil(np.array(points) / 16) + noise
    assert plateau(points, steps, 1, [4, 8, 16]) == 16
    assert plateau(points, np.array(points) / 16 + noise, 1, [4, 8, 16]) == 1
    assert plateau(points, np.ones(len(points)) + noise, 1, [4, 8, 16]) == 1


def test_the_command_writes_a_table_that_a_run_is_priced_with(
    gaugelasso: Command, tmp_path: Path
) -> None:
    config, out = write_tiny(tmp_path), tmp_path / "tables" / "t.json"
    options = ("--device", "cpu", "--batch", "2", "--length", "5", "--out", out)
    code, printed, err = gaugelasso("profile", config, *options)
    assert code == 0, err
    assert "by the table and" in printed
    assert "2×5 tokens, float32" in printed
    table = TimeTable.read(out)
    before = out.read_bytes()
    assert_user_error(gaugelasso("profile", config, *options), "already exists; add --overwrite")
    assert out.read_bytes() == before

    named = ("--set", "compress.accounting=latency", "--set", f"compress.profile={out}")
    run = tmp_path / "run"
    code, printed, err = gaugelasso("train", config, "--out", run, *named)
    assert code == 0, err
    assert " ms (accounting: latency; " in printed
    summary = json.loads((run / "summary.json").read_text())
    model = tiny(tmp_path).model.build(tiny(tmp_path).task, 3)
    assert summary["fma_initial"] == pytest.approx(estimate(model, table))
    code, printed, err = gaugelasso("profile", run, "--device", "cpu", "--out", tmp_path / "u.json")
    assert code == 0, err
    assert TimeTable.read(tmp_path / "u.json").circumstances.length == 6
    code, printed, _ = gaugelasso("info", run)
    assert "FMA per token" in printed
    assert "bytes (weights in bfloat16" in printed


def test_what_cannot_be_measured_is_refused(gaugelasso: Command, tmp_path: Path) -> None:
    config, out = write_tiny(tmp_path), tmp_path / "t.json"
    for options, message in (
        (("--length", "7"), "--length 7: the model's sequences have 6 tokens at most"),
        (("--dtype", "int4"), "--dtype int4: choose one of float32, bfloat16, float16"),
        (("--set", "train.stepz=4"), "unknown key train.stepz"),
    ):
        answer = gaugelasso("profile", config, "--device", "cpu", "--out", out, *options)
        assert_user_error(answer, message)
    assert not out.exists()


def test_a_table_that_disagrees_with_the_model_is_told(
    gaugelasso: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert apart(17.9, 18.0) == apart(0.84, 1.16) == apart(1.0, 1.99) == apart(8.0, 6.1) == ""
    assert "(39.8 ms and 58.4 ms). Is the machine busy?" in apart(39.8, 58.4)
    assert "(58.4 ms and 39.8 ms)" in apart(58.4, 39.8)

    out = tmp_path / "t.json"
    given = ("profile", write_tiny(tmp_path), "--device", "cpu", "--out", out)
    for whole, warned in ((0.1, False), (1000.0, True)):
        monkeypatch.setattr(Profile, "whole", lambda self, whole=whole: whole)
        code, printed, _ = gaugelasso(*given, "--overwrite")
        assert code == 0
        assert out.exists()
        assert ("warning: the table and the whole model disagree" in printed) == warned


def test_the_measurement_says_how_far_it_is(
    gaugelasso: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiles, "_LINE_EVERY", 0.0)
    given = ("profile", write_tiny(tmp_path), "--device", "cpu", "--out", tmp_path / "t.json")
    _, printed, _ = gaugelasso(*given)
    lines = [line for line in printed.splitlines() if line.startswith("measuring")]
    assert lines[0] == "measuring the fastest forms of the model"
    assert lines[1] == f"measuring: 0 of {len(lines) - 2} kinds of operations"
    assert lines[-1] == f"measuring: {len(lines) - 2} of {len(lines) - 2} kinds of operations"


@pytest.mark.parametrize("options", [(), ("--decode",)], ids=["forward", "decode"])
def test_a_batch_that_cannot_fit_is_refused(
    gaugelasso: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
) -> None:
    monkeypatch.setattr(activations, "memory_bytes", lambda: 10**7)
    out = tmp_path / "t.json"
    given = ("--device", "cpu", "--batch", "1000000", "--out", out, *options)
    answer = gaugelasso("profile", write_tiny(tmp_path), *given)
    assert_user_error(answer, "--batch 1000000 sequences of 6 positions make ")
    assert "sequences could fit: lower it or --length" in answer[2]
    assert not out.exists()
