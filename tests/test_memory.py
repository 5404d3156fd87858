"""What does not fit into memory is refused with what would; nothing large is ever allocated."""

import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from gaugelasso import memory
from gaugelasso.config.activations import cached
from gaugelasso.errors import UserError
from gaugelasso.inference import InferenceModel, generate
from gaugelasso.models import Transformer, TransformerSpec

TIB = 2**40


def model(words: int = 9) -> InferenceModel:
    spec = TransformerSpec.uniform(
        width=8, layers=3, heads=2, d_k=4, d_v=4, d_f=8, length=20, inputs=words, outputs=words
    )
    return InferenceModel(Transformer(spec).eval())


@pytest.fixture(autouse=True)
def _free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 10**9)


def test_a_cache_that_does_not_fit_is_refused_with_what_would() -> None:
    served = model()
    each = 20 * served.cache_bytes_per_token
    assert each == 20 * 3 * 2 * (4 + 4) * 4
    with pytest.raises(UserError) as refused:
        served.new_cache(10**9)
    assert str(refused.value) == (
        "a cache of 20 tokens of 1,000,000,000 sequences needs 3.84e+03 GB, and 1 GB of cpu memory "
        f"are free; at most {10**9 // each:,} could fit"
    )
    # One more than fits, and a small one beside a free memory that is not asked for.
    with pytest.raises(UserError, match=f"at most {10**9 // each:,} could fit"):
        served.new_cache(10**9 // each + 1)
    assert served.new_cache(2).batch == 2


def test_prompts_that_do_not_fit_are_refused_before_they_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "_SMALL", 0)
    served = model()
    generate(served, [[1, 2]] * 3, 2)
    monkeypatch.setattr(memory, "free_bytes", lambda device: 4 * 20 * served.cache_bytes_per_token)
    with pytest.raises(UserError, match=r"a cache of 4 tokens of 30 sequences .* at most 20 could"):
        generate(served, [[1, 2]] * 30, 2)
    # Logits of a large vocabulary are larger than the cache.
    monkeypatch.setattr(memory, "free_bytes", lambda device: 3 * 4 * (2 * 8 + 999))
    message = r"reading prompts of up to 2 tokens of 4 sequences .* at most 3 could fit"
    with pytest.raises(UserError, match=message):
        generate(model(words=999), [[1, 2]] * 4, 1)


def test_of_a_cache_all_layers_count() -> None:
    assert 4 * cached(model().spec) == model().cache_bytes_per_token


def test_where_not_one_fits_the_message_says_so() -> None:
    with pytest.raises(UserError, match="not one fits: give shorter ones"):
        memory.check_fits(TIB, 1, "a cache", "cpu")


CUDA = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.80 GiB of "
    "which 3.20 GiB is free."
)


def test_a_lack_of_memory_on_a_gpu_names_a_batch_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    made = [0]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 * 2**30, 140 * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5 * 2**30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: made[0])

    def serve() -> None:
        with memory.says_what_fits(64, "cuda"):
            made[0] = 20 * 2**30
            raise torch.OutOfMemoryError(CUDA)

    # 15 GiB were free, 20 GiB were made and 20 GiB failed.
    with pytest.raises(UserError, match=r"batch of 64 .* 16.1 GB of free cuda memory; try 24$"):
        serve()


@pytest.mark.parametrize(("batch", "remedy"), [(64, "try 32"), (1, "give shorter sequences")])
@pytest.mark.parametrize("error", [
    MemoryError("std::bad_alloc"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1000 bytes"),
])  # fmt: skip
def test_a_lack_of_memory_on_a_cpu_names_at_most_half_of_the_batch(
    batch: int, remedy: str, error: Exception
) -> None:
    with (
        pytest.raises(UserError, match=f"^out of memory.* does not fit .*; {remedy}$"),
        memory.says_what_fits(batch, "cpu"),
    ):
        raise error


def test_other_errors_stay_as_they_are() -> None:
    with pytest.raises(RuntimeError, match=r"^shapes$"), memory.says_what_fits(2, "cpu"):
        raise RuntimeError("shapes")


def test_the_free_memory_of_a_cpu_is_at_most_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert 2**20 < memory.free_bytes("cpu") <= memory.memory_bytes()

    def missing(*_: Any, **__: Any) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(memory.Path, "read_text", missing)  # not Linux
    assert memory.free_bytes("cpu") == memory.memory_bytes()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_what_a_limited_process_has_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (taken + 2**28, taken + 2**28))
    assert 0 < memory.free_bytes("cpu") < 2**29 < memory.memory_bytes()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2**20, 2**20))
    assert memory.free_bytes("cpu") == 0
