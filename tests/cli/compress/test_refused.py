"""What the command `compress` refuses."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gaugelasso.cli.compression_folder import Stages
from gaugelasso.importing.folder import write_imported
from tests.cli.compress.commands import OPTIONS, VOCABULARY, changed, save_trained
from tests.command import Command, assert_user_error
from tests.importing.bases import tiny_gguf
from tests.importing.sources import llama, qwen2
from tests.tasks.tokenizers import byte_level, save, with_fallback
from tests.tiny_runs import contents


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--above-original", "-3%"), "--above-original '-3%': give a share"),
        (("--above-original", "3"), "--above-original '3' would be 300%; write 3% or 300%"),
        (
            ("--form", "tflite"),
            "--form 'tflite' is unknown; choose one of: onnx, pt2, hf, llama, gguf, native, none",
        ),
        (("--set", "target.loss=3"), "--set target.loss=3: give the target with --above-original"),
        (("--set", "task.path=b.txt"), "--set task.path=b.txt: give the text with --data"),
        (("--set", "train.stepz=3"), "stepz"),
        (("--set", "compress.drop_tolerance=much"), "compress.drop_tolerance"),
        (("--set", "model.layers=3"), "model.layers = 3: the structure comes from MODEL"),
        (("--steps", "3"), "--steps 3: a final loss needs at least 20 steps"),
        (("--set", "compress.accounting=latency"), "needs compress.profile, the table"),
        (("--device", "abacus"), "device 'abacus' is unknown"),
        (("--data", "nothing.txt"), "--data 'nothing.txt': no such file"),
        (("--data", "nothing"), "--data 'nothing': no text in this folder"),
        (("--data", "empty.txt"), "--data 'empty.txt': the text is empty"),
        (("--valid", "empty.txt"), "--valid 'empty.txt': the text is empty"),
        (("--data", "numbers.txt"), "text 'numbers.txt': 100.0% of its bytes are zero"),
        (("--valid", "short.txt"), "has 20 bytes, and so not more tokens; --length 16 needs at"),
        (("--resume", "--overwrite"), "exclude each other"),
    ],
)
def test_bad_arguments(
    more: tuple[str, ...],
    message: str,
    place: Path,
    gaugelasso: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Found before the import, which takes long for a large model."""
    (place / "short.txt").write_text("The quick brown fox.")
    (place / "empty.txt").write_text("")
    (place / "numbers.txt").write_bytes(bytes(10_000))
    (place / "nothing").mkdir()
    monkeypatch.setattr(Stages, "import_base", None)
    assert_user_error(gaugelasso("compress", "model", *changed(*more)), message)
    assert not (place / "out").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--above-original", "2000%"), "--above-original 2000% names a loss of"),
        (("--above-original", "2000%"), "guessing among 300 tokens has 5.704"),
        (("--length", "41"), "--length 41: the model has 40 positions; give at most 40"),
        (("--set", "model.context=41"), "the model has 40 positions, and --length 16 and model.co"),
        (("--valid", "short.txt"), "has 32 tokens; --length 16 needs at least 81 (2 windows"),
    ],
)
def test_arguments_that_do_not_fit_the_model(
    more: tuple[str, ...], message: str, place: Path, gaugelasso: Command
) -> None:
    """Nothing is left of a folder that the command has made; what was there stays."""
    (place / "short.txt").write_text("The quick brown fox." * 4)
    assert_user_error(gaugelasso("compress", "model", *changed(*more)), message)
    assert not (place / "out").exists()
    write_imported(Path("model"), Path("out/base"))
    before = contents(place / "out")
    assert_user_error(gaugelasso("compress", "model", *changed(*more, "--resume")), message)
    assert contents(place / "out") == before


def test_models_that_cannot_be_compressed(place: Path, gaugelasso: Command) -> None:
    assert_user_error(
        gaugelasso("compress", "other.gguf", *OPTIONS),
        "check that MODEL and --data belong together",
    )
    tokenizer = place / "model" / "tokenizer.json"
    byte_level(VOCABULARY, ["<more>"]).save(str(tokenizer))
    assert_user_error(
        gaugelasso("compress", "model", *OPTIONS), "the model has the tokens 0 to 299"
    )
    tokenizer.unlink()
    message = "'model' has no tokenizer, which text needs (tokenizer.json is missing); name one"
    assert_user_error(gaugelasso("compress", "model", *OPTIONS), message)
    tiny_gguf(place / "plain.gguf", {})
    message = "'plain.gguf' has no tokenizer, which text needs ("
    assert_user_error(gaugelasso("compress", "plain.gguf", *OPTIONS), message)
    about = place / "model" / "config.json"
    about.write_text(about.read_text().replace("LlamaForCausalLM", "MambaForCausalLM"))
    answer = gaugelasso("compress", "model", *OPTIONS)
    assert_user_error(answer, "the architecture 'MambaForCausalLM' cannot be imported")
    assert not (place / "out").exists()


@pytest.mark.parametrize(
    ("make", "message"),
    [(qwen2, "form 'gguf' holds no biases"), (llama, "form 'gguf' holds byte-level BPE that")],
)
def test_what_no_gguf_file_holds_is_refused_before_training(
    make: Callable[..., Any], message: str, place: Path, gaugelasso: Command
) -> None:
    model = make(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=1)
    with_bytes = with_fallback() if make is llama else byte_level(VOCABULARY)
    save_trained(model, with_bytes, place / "another")
    as_gguf = ("--form", "gguf", "--set", "compress.shape=llama")
    assert_user_error(gaugelasso("compress", "another", *changed(*as_gguf)), message)
    assert not (place / "out").exists()


def test_a_form_is_checked_with_the_tokenizer_of_the_task(place: Path, gaugelasso: Command) -> None:
    save(with_fallback(), place / "fallback" / "tokenizer.json")
    other = ("--set", "task.tokenizer=fallback", "--form", "gguf", "--set", "compress.shape=llama")
    answer = gaugelasso("compress", "model", *changed(*other))
    assert_user_error(answer, "'fallback/tokenizer.json': form 'gguf' holds byte-level BPE that")


def test_several_processes_are_refused(
    place: Path, gaugelasso: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert_user_error(gaugelasso("compress", "model", *OPTIONS), "compress runs in one process")
