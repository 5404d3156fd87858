"""The accounting `bytes` against what an export and a cache take."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gaugelasso import Compressor, CompressorOptions, Transformer, UserError
from gaugelasso.axes import named_tensors
from gaugelasso.compress.memory import Memory
from gaugelasso.compress.pricing import total_fma
from gaugelasso.files.tensors import read_tensors
from gaugelasso.inference import InferenceModel
from gaugelasso.inference.stored import save
from tests.contract.models import Case, make
from tests.inference.cases import CASES, GENERATIVE

SLOW = [case for case in CASES if make(case).initial_spec.norm == "slow" and case.seed == 0]


def counted(model: Transformer, memory: Memory) -> float:
    return total_fma(model.axis_table(), memory, named_tensors(model))


@pytest.mark.parametrize("case", SLOW, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_are_those_of_export_and_cache(case: Case, dtype: str, tmp_path: Path) -> None:
    model, precision = make(case), getattr(torch, dtype)
    save(model, tmp_path, precision)
    taken = sum(each.nbytes for each in read_tensors(tmp_path / "model.safetensors").values())
    if case in GENERATIVE:
        served = InferenceModel(model, dtype=precision)
        taken += served.new_cache(3, model.initial_spec.length - 1).bytes
    length = model.initial_spec.length - 1
    assert counted(model, Memory(dtype, 3, length)) == taken


def test_a_length_of_zero_is_that_of_the_model() -> None:
    model = make(GENERATIVE[0])
    length = model.initial_spec.length
    memory = Memory(batch=2)
    assert counted(model, memory) == counted(model, replace(memory, length=length))
    per_token = InferenceModel(model, dtype=torch.bfloat16).cache_bytes_per_token
    more = replace(memory, length=length + 5)
    assert counted(model, more) - counted(model, memory) == 2 * 5 * per_token


def test_a_run_in_bytes_presses_the_cache_of_many_sequences() -> None:
    model = make(GENERATIVE[0]).float()
    keys = next(name for name in Compressor(model, 1.0).widths if name.endswith("d_k"))

    def share(batch: int) -> float:
        options = CompressorOptions(accounting="bytes", serving_batch=batch)
        compressor = Compressor(model, 1.0, options)
        assert compressor.state.cost_model.unit == "bytes"
        return float(compressor.prices[keys][0] / compressor.fma)

    assert share(64) > 1.5 * share(1)


@pytest.mark.parametrize(
    ("key", "value"), [("serving_batch", 0), ("serving_length", -1), ("serving_dtype", "int4")]
)
def test_wrong_options_are_named(key: str, value: object) -> None:
    with pytest.raises(UserError, match=rf"compress\.{key} = "):
        CompressorOptions(**{key: value})  # type: ignore[arg-type]
