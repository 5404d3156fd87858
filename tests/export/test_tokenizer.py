"""Exports of imported models, and of runs with a tokenizer."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from gaugelasso.errors import UserError
from gaugelasso.export import export, read_source
from gaugelasso.export.examples import example
from gaugelasso.files.tokenizer import load_tokenizer
from gaugelasso.inference import InferenceModel, load
from gaugelasso.models import Transformer
from gaugelasso.runs.checkpoint import load_model
from tests.export.sources import (
    card_example,
    greedy,
    page_examples,
    run_example,
    tiny,
    write_run,
)
from tests.importing.bases import write_base

TEXT = "The quick brown fox, été\n\n 12 o'clock"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(autouse=True)
def _own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers copies a folder's code to a cache: not to that of the user."""
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")


def test_an_imported_model_is_exported_with_its_tokenizer(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import AutoTokenizer

    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)  # it does not propagate to the root
    try:
        folder = export(base, "hf", tmp_path / "hf").folder
        theirs: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    finally:
        logger.removeHandler(caplog.handler)
    assert "to instantiate a model of type" not in caplog.text
    ours = load_tokenizer(base)
    tokens = ours.encode([TEXT])[0].tolist()
    assert theirs.encode(TEXT) == tokens
    assert theirs.decode(tokens) == TEXT
    config = json.loads((folder / "config.json").read_text())
    assert config["eos_token_id"] == ours.inner.token_to_id("<|end|>") == theirs.eos_token_id
    card = (folder / "README.md").read_text()
    assert "imported from `" in card
    assert "those of the model's tokenizer" in card
    assert "## Target" not in card
    model = load_model(base)
    assert isinstance(model, Transformer)
    prompt = ours.encode(["The "])[0].tolist()
    [new] = greedy(model, [prompt], 20)
    # The example prints text: run_example reads what the tokens would be.
    program = card_example(folder).replace(
        "print(tokenizer.decode(new_tokens))", "print(new_tokens)"
    )
    stop = config["eos_token_id"]
    assert run_example(program) == new[: new.index(stop) + 1 if stop in new else len(new)]


def test_other_forms_have_the_tokenizer_beside_them(base: Path, tmp_path: Path) -> None:
    folder = export(base, "native", tmp_path / "native").folder
    assert (folder / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    model = load_model(base)
    assert isinstance(model, Transformer)
    tokens = torch.randint(300, (2, 9), generator=torch.Generator().manual_seed(0))
    assert torch.equal(load(folder)(tokens), InferenceModel(model.eval())(tokens))


@pytest.mark.parametrize("form", ["native", "onnx", "pt2"])
def test_cards_of_other_forms_read_text_by_the_tokenizer(
    form: str, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = read_source(base), tmp_path / "out"
    program = example(source, form, out, torch.float32)
    assert f'tokenizer = Tokenizer.from_file("{out}/tokenizer.json")' in program
    assert 'tokenizer.encode("The ", add_special_tokens=False).ids' in program
    assert program.endswith("print(tokenizer.decode(new_tokens))\n")
    assert "list(b" not in program
    compile(program, form, "exec")
    if form == "native":  # the others take seconds to export
        export(base, form, out)
        assert card_example(out) == program
        assert "For text also `pip install tokenizers`." in (out / "README.md").read_text()
        tokenizer = load_tokenizer(base)
        prompt = tokenizer.encode(["The "])[0].tolist()
        model = load_model(base)
        assert isinstance(model, Transformer)
        [expected] = greedy(model, [prompt], 20)
        assert run_example(program) == expected
        assert capsys.readouterr().out == tokenizer.inner.decode(expected) + "\n"


def test_the_page_has_the_lines_of_the_tokenizer(base: Path, tmp_path: Path) -> None:
    [lines] = (text for text in page_examples() if "from tokenizers import" in text)
    folder = export(base, "native", tmp_path / "native").folder
    names: dict[str, Any] = {"new_tokens": [65]}
    exec(lines.replace("bases/smol/export/onnx", str(folder)), names)
    assert names["prompt"] == load_tokenizer(base).encode(["The "])[0].tolist()


def test_the_class_of_a_tokenizer_does_not_change_it(base: Path, tmp_path: Path) -> None:
    """Some classes of transformers build parts of the tokenizer anew, and run code of a folder."""
    from transformers import AutoTokenizer

    shutil.copytree(base, tmp_path / "base")
    about = {"tokenizer_class": "GPT2Tokenizer", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}
    (tmp_path / "base" / "tokenizer_config.json").write_text(json.dumps(about))
    folder = export(tmp_path / "base", "hf", tmp_path / "hf").folder
    theirs: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    assert theirs.encode(TEXT) == load_tokenizer(base).encode([TEXT])[0].tolist()


def test_a_run_of_tokens_has_no_tokenizer_of_bytes(base: Path, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", tiny(inputs=300, outputs=300), {"name": "tokens"})
    folder = export(run, "hf", tmp_path / "plain").folder
    assert not (folder / "tokenizer.json").exists()
    shutil.copy(base / "tokenizer.json", run)
    folder = export(run, "hf", tmp_path / "hf").folder
    assert (folder / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{}", "not a readable tokenizer"),
        ("tokenizer_config.json", "[]", "not a JSON object"),
        ("tokenizer_config.json", "{", "not a readable JSON file"),
    ],
)
def test_damaged_tokenizers_are_refused(
    name: str, content: str, message: str, base: Path, tmp_path: Path
) -> None:
    shutil.copytree(base, tmp_path / "base")
    (tmp_path / "base" / name).write_text(content)
    with pytest.raises(UserError, match=message):
        export(tmp_path / "base", "hf", tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_a_tokenizer_that_does_not_fit_is_refused(base: Path, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", tiny(inputs=299, outputs=299), {"name": "tokens"})
    shutil.copy(base / "tokenizer.json", run)
    with pytest.raises(UserError, match="the model has the tokens 0 to 298"):
        export(run, "hf", tmp_path / "hf")
