"""The tokenizer of a run as metadata of a GGUF file: byte-level BPE, split in a way that is named.

A tokenizer of another kind is refused. `importing.gguf_tokenizer` is the other direction.
"""

import json
from pathlib import Path
from typing import Any

from gaugelasso.errors import UserError
from gaugelasso.export.source import Source
from gaugelasso.export.to_hf import TEXTS
from gaugelasso.files.gguf import Value
from gaugelasso.files.tokenizer import (
    NAME,
    SETTINGS,
    Tokenizer,
    byte_names,
    load_tokenizer,
    named_token,
    parse_tokenizer,
    read_files,
    token_settings,
    tokenizers_library,
)
from gaugelasso.importing.gguf_tokenizer import NORMAL, SPLITS, TYPES, UNUSED, empty
from gaugelasso.importing.source import Source as Written

_KEY = "tokenizer.ggml."
_IDS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_TEMPLATE = "chat_template.jinja"
# A byte that no text in UTF-8 has. Where a file names no end of a text, llama.cpp takes token 11.
_NO_BYTE = 255
# Added tokens whose surroundings are compared.
_COMPARED = 64


def tokenizer_metadata(source: Source) -> dict[str, Value]:
    """Of the run's tokenizer, of bytes for a text of bytes, or the word that there is none."""
    if source.has_tokenizer:
        found = of_run(source.run, source.spec.inputs)
    elif source.is_text:  # without merges, the way of splitting has no effect
        tokens = _tokens(byte_names(), {}, [], source.spec.inputs)
        found = {"model": "gpt2", "pre": "gpt-2", **tokens}
        found |= {"add_bos_token": False, "bos_token_id": _NO_BYTE, "eos_token_id": _NO_BYTE}
    else:
        found = {"model": "no_vocab"}
    return {key if "." in key else f"{_KEY}{key}": value for key, value in found.items()}


def check_tokenizer(source: Source, written: Written) -> None:
    """UserError if the tokenizer that is read from a file is not that of the run."""
    if not source.has_tokenizer:
        return
    files = written.tokenizer()
    if isinstance(files, str):
        raise UserError(f"{str(source.run / NAME)!r}: {files}, so nothing was written")
    theirs, ours = parse_tokenizer(files[NAME], str(written.path)), load_tokenizer(source.run)
    # Some tokenizers take spaces beside an added token with it, or want a word's end there.
    added = [each.content for each in ours.inner.get_added_tokens_decoder().values()][:_COMPARED]
    for text in (*TEXTS, *(f"a {token} b{token}c" for token in added)):
        if theirs.encode([text])[0].tolist() != ours.encode([text])[0].tolist():
            raise UserError(
                f"{str(source.run / NAME)!r}: a GGUF file would have another tokenizer, so nothing "
                "was written"
            )


def of_run(run: Path, size: int) -> dict[str, Value]:
    """Of a run's tokenizer, for a model of so many tokens; UserError if no file holds it."""
    ours = load_tokenizer(run)
    ours.check_fits(size, "the model")
    data = json.loads(ours.inner.to_str())
    names = [f"[PAD{number}]" for number in range(ours.size)]
    for token, number in ours.inner.get_vocab(with_added_tokens=True).items():
        names[number] = token
    used = set(ours.inner.get_vocab(with_added_tokens=True).values())
    types = {number: UNUSED for number in range(ours.size) if number not in used}
    for token in data["added_tokens"]:
        types[token["id"]] = TYPES[bool(token["special"])]
    split = _split(data, run)
    merges = [each if isinstance(each, str) else " ".join(each) for each in data["model"]["merges"]]
    found: dict[str, Value] = {
        "model": "gpt2",
        "pre": split,
        **_tokens(names, types, merges, size),
        **_ids(ours, run, [number for number in range(size) if number not in used]),
    }
    template = token_settings(run).get("chat_template")
    beside = read_files(run, (_TEMPLATE,)).get(_TEMPLATE)
    if beside is not None:
        template = beside.decode(errors="replace")
    return found | ({"tokenizer.chat_template": template} if isinstance(template, str) else {})


def _tokens(
    names: list[str], types: dict[int, int], merges: list[str], size: int
) -> dict[str, Value]:
    """As many tokens as the model has: readers compare the two."""
    more = [f"[PAD{number}]" for number in range(len(names), size)]
    kinds = [types.get(number, NORMAL) for number in range(len(names))]
    return {
        "tokens": names + more,
        "token_type": kinds + [UNUSED] * len(more),
        "merges": merges,
    }


def _ids(ours: Tokenizer, run: Path, unused: list[int]) -> dict[str, Value]:
    numbers = {name: named_token(ours, run, f"{kind}_token") for kind, name in _IDS.items()}
    whole = ours.inner.encode("a", add_special_tokens=True).ids
    # Written in any case, because readers take it from `pre` where it is missing.
    adds: dict[str, Value] = {"add_bos_token": whole[:1] == [numbers["bos"]]}
    if numbers["eos"] is not None and whole[-1:] == [numbers["eos"]]:
        adds["add_eos_token"] = True
    if numbers["eos"] is None:
        byte = ours.inner.token_to_id(byte_names()[_NO_BYTE])
        numbers["eos"] = next(iter(unused), byte)
    if numbers["eos"] is None:
        raise UserError(
            f"{str(run / NAME)!r} has no eos_token, and llama.cpp would end a text at "
            f"token 11; name one in {str(run / SETTINGS)!r}"
        )
    numbers["bos"] = numbers["eos"] if numbers["bos"] is None else numbers["bos"]
    found = {f"{name}_token_id": number for name, number in numbers.items() if number is not None}
    return found | adds


def _split(data: dict[str, Any], run: Path) -> str:
    """The name of the way in which the tokenizer splits a text into words."""
    ours = _parts(data)
    if data["model"].get("type") == "BPE":
        for name in SPLITS:
            if _parts(json.loads(empty(tokenizers_library(), name).to_str())) == ours:
                return name
    raise UserError(
        f"{str(run / NAME)!r}: form 'gguf' holds byte-level BPE that splits a text as "
        f"{', '.join(SPLITS)} do, and this tokenizer is another; choose llama, hf, onnx, pt2 or "
        "native"
    )


def _parts(data: dict[str, Any]) -> tuple[Any, ...]:
    """What decides how a text becomes tokens, beside vocabulary and merges."""
    model = data["model"]
    return (
        _plain(data["normalizer"]),
        _plain(data["pre_tokenizer"]),
        bool(model.get("ignore_merges")),
        bool(model.get("byte_fallback")),
    )


def _plain(part: Any) -> Any:
    """Without what has no effect on tokens: the offsets that are reported with them."""
    if isinstance(part, dict):
        return {key: _plain(each) for key, each in part.items() if key != "trim_offsets"}
    return [_plain(each) for each in part] if isinstance(part, list) else part
