"""A result of the command is compressed again."""

from pathlib import Path

import pytest
import torch

from gaugelasso import load_model
from gaugelasso.export import export
from gaugelasso.importing.folder import write_imported
from tests.cli.compress.commands import changed, table_row
from tests.command import Command, assert_user_error
from tests.importing.sources import vit
from tests.tiny_runs import start, stop_at


@pytest.mark.parametrize("model", ["out", "out/run"])
def test_a_result_is_compressed_again(model: str, out: Path, gaugelasso: Command) -> None:
    options = changed("--out", "again", "--form", "none", "--steps", "20")
    options = (*options, "--above-original", "100%")
    code, said, error = gaugelasso("compress", model, *options)
    assert code == 0, error
    assert "model: that of the run 'out/run', whose loss counts as the original's" in said
    assert "import: the model of the run 'out/run'" in said
    first, base = load_model("out/run"), load_model("again/base")
    weights = base.state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in first.state_dict().items())
    parameters = sum(parameter.numel() for parameter in first.parameters())
    assert table_row(said, "parameters")[0] == f"{parameters:,}"
    assert (Path("again") / "run" / "tokenizer.json").exists()
    assert gaugelasso("compress", model, *options, "--resume")[0] == 0
    answer = gaugelasso("compress", "model", *options, "--resume")
    assert_user_error(answer, "'again/base' was not imported from 'model'")


def test_a_result_is_not_compressed_into_itself(out: Path, gaugelasso: Command) -> None:
    answer = gaugelasso("compress", "out", *changed("--overwrite"))
    assert_user_error(answer, "--overwrite would remove 'out/run', which is in 'out'")
    answer = gaugelasso("compress", "out", *changed("--resume"))
    assert_user_error(answer, "'out/base' was not imported from 'out/run'")


def test_what_is_no_model_of_this_command_says_what_to_do(out: Path, gaugelasso: Command) -> None:
    export(out / "run", "hf", Path("exported"))
    for folder, message in (
        ("exported", "'exported' is an export of gaugelasso for transformers; give the run folder"),
        ("out/hf", "'out/hf' is an export of gaugelasso for transformers; give the run folder"),
    ):
        for command in ("compress", "import"):
            more = changed("--out", "again") if command == "compress" else ("--out", "again")
            assert_user_error(gaugelasso(command, folder, *more), message)
    for folder, message in (
        ("out", "what there is of a model is in 'out/run', and needs no import"),
        ("out/run", "is a folder of gaugelasso already; eval, export and compress take it"),
        ("out/base", "is a folder of gaugelasso already; eval, export and compress take it"),
    ):
        assert_user_error(gaugelasso("import", folder, "--out", "again"), message)
    assert not Path("again").exists()


def test_models_of_other_tasks_are_refused(place: Path, gaugelasso: Command) -> None:
    stop_at(start(place), 25)
    answer = gaugelasso("compress", "run", *changed())
    assert_user_error(answer, "'run' has no tokenizer, which text needs")
    vit().save_pretrained("images")
    write_imported(Path("images"), Path("base"))
    answer = gaugelasso("compress", "base", *changed())
    assert "'base' holds no built-in transformer that reads tokens" in answer[2]
    assert not Path("out").exists()
