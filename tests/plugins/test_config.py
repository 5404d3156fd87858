"""What a config may name, and the error for everything else."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from gaugelasso.config import Config, ModelConfig, load_config
from gaugelasso.errors import UserError
from gaugelasso.models.own import OwnModel
from gaugelasso.plugins import NamedBy, Reference, class_reference
from tests.command import Command, assert_user_error
from tests.tiny_runs import read


def sections(task: Any, model: Any = None) -> dict[str, Any]:
    data = {"task": task if isinstance(task, dict) else {"module": task}}
    return data | (
        {"model": model if isinstance(model, dict) else {"module": model}} if model else {}
    )


def test_a_file_is_relative_to_the_config_and_kept_as_an_absolute_path(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(Path("code/own.toml"), {"task.inputs": "5", "model.hidden": "7"})
    assert config.task_name == "Regression"
    assert config.task.inputs == 5  # type: ignore[attr-defined]
    data = config.to_dict()
    folder = own.parent.resolve()
    assert data["task"] == {"module": f"{folder}/my_tasks.py:Regression", "inputs": 5, "outputs": 2}
    # Defaults of the signature are in the record of the run.
    assert data["model"] == {"module": f"{folder}/my_models.py:build", "hidden": 7, "note": "plain"}
    monkeypatch.chdir("/")
    assert Config.from_dict(data).to_dict() == data
    assert set(config.code()) == {"task", "model"}


def test_set_names_a_file_relative_to_the_working_directory(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = own.with_name("plain.toml")
    plain.write_text("[train]\nsteps = 90\n")
    monkeypatch.chdir(own.parent.parent)
    config = load_config(plain, {"task.module": "code/my_tasks.py:Copying"})
    assert config.task_module == f"{own.parent.resolve()}/my_tasks.py:Copying"
    assert isinstance(config.model, ModelConfig)


def test_a_dotted_module_and_a_nested_name(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = own.parent / "a_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    text = (own.parent / "my_tasks.py").read_text()
    (package / "tasks.py").write_text(text + "\nclass All:\n    Copying = Copying\n")
    monkeypatch.syspath_prepend(own.parent)
    config = Config.from_dict(sections("a_package.tasks:All.Copying"))
    assert config.to_dict()["task"]["module"] == "a_package.tasks:All.Copying"
    assert class_reference(type(config.task)) == "a_package.tasks:Copying"


FILE = "my_tasks.py"
WRONG: dict[str, tuple[Any, Any, str]] = {
    "no name": (FILE, None, 'write "file.py:Name" or "package.module:Name"'),
    "a number": ({"module": 3}, None, "task.module = 3: write"),
    "no identifier": ("my-tasks:Copying", None, 'write "file.py:Name"'),
    "name and module": ({"module": f"{FILE}:Copying", "name": "ff31"}, None, "exclude each other"),
    "no file": ("none.py:Copying", None, "none.py:Copying': no such file"),
    "no module": ("no_such_package.tasks:Copying", None, "raised ModuleNotFoundError: No module"),
    "no attribute": (f"{FILE}:Copyin", None, "has no 'Copyin'; did you mean 'Copying'?"),
    "import raises": ("bad.py:Task", None, "raised ZeroDivisionError: division by zero (line 2)"),
    "syntax": ("syntax.py:Task", None, "raised SyntaxError"),
    "import exits": ("exits.py:Task", None, "raised SystemExit"),
    "no dataclass": (f"{FILE}:NoDataclass", None, "must be a frozen dataclass"),
    "a function": ("my_models.py:build", None, "must be a frozen dataclass"),
    "members": (f"{FILE}:Incomplete", None, "has no metric_lower_is_better, batch, loss, metric;"),
    "field type": (f"{FILE}:WithList", None, "field 'widths' must be an int, float, bool, str"),
    "required field": (f"{FILE}:Demanding", None, "task.level is missing; 'Demanding' needs it"),
    "unknown field": (
        {"module": f"{FILE}:Copying", "vocabulry": 3}, None,
        "unknown key task.vocabulry; did you mean 'vocabulary'?",
    ),
    "field value": ({"module": f"{FILE}:Copying", "length": 2.5}, None, "must be a whole number"),
    "field choice": (
        {"module": f"{FILE}:Copying", "order": "odd"}, None, "choose one of: same, reversed",
    ),
    "its own check": (
        {"module": f"{FILE}:Copying", "vocabulary": 1}, None,
        "Copying raised ValueError: a vocabulary of 1",
    ),
    "no sequences": (
        f"{FILE}:Regression", None,
        "Regression has no input_kind, causal, length, which the built-in transformer needs",
    ),
    "unknown name": ({"name": "sort"}, None, "task.name = 'sort' is unknown; choose one of: retr"),
    "model name": (f"{FILE}:Copying", {"name": "gpt"}, "choose one of: transformer; or set model"),
    "model not callable": (f"{FILE}:Copying", "my_models.py:NUMBER", "is 3; it must be a class or"),
    "model class": (f"{FILE}:Copying", f"{FILE}:NoDataclass", "does not derive from gaugelasso.C"),
    "model key": (
        f"{FILE}:Regression", {"module": "my_models.py:build", "hiden": 3},
        "unknown key model.hiden; did you mean 'hidden'?",
    ),
    "model value": (
        f"{FILE}:Regression", {"module": "my_models.py:build", "hidden": "x"},
        "model.hidden = 'x': must be a whole number",
    ),
    "model argument": (f"{FILE}:Regression", "my_models.py:broken", "model.hidden is missing"),
    "model name and module": (
        f"{FILE}:Regression", {"module": "my_models.py:build", "name": "transformer"},
        "model.name and model.module exclude each other",
    ),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_name_is_an_error_that_says_what_is_right(own: Path, wrong: str) -> None:
    folder = own.parent
    (folder / "bad.py").write_text("x = 1\n1 / 0\n")
    (folder / "syntax.py").write_text("def\n")
    (folder / "exits.py").write_text("import sys\nsys.exit(3)\n")
    task, model, message = WRONG[wrong]
    with pytest.raises(UserError) as error:
        Config.from_dict(sections(task, model), NamedBy(folder))
    assert message in str(error.value)


BUILDERS = {
    "broken": ({"hidden": 3}, "returned Linear; it must return a gaugelasso.Compressible"),
    "raising": ({}, "raised RuntimeError: no weights today"),
}


@pytest.mark.parametrize("name", BUILDERS)
def test_a_builder_that_fails_is_named(own: Path, name: str) -> None:
    arguments, message = BUILDERS[name]
    data = sections(f"{FILE}:Regression", {"module": f"my_models.py:{name}", **arguments})
    data["target"] = {"hold": "pressed"}  # no values that follow from the model
    config = Config.from_dict(data, NamedBy(own.parent))
    assert isinstance(config.model, OwnModel)
    with pytest.raises(UserError) as error:
        config.model.build(config.task, 0)
    assert message in str(error.value)


CHANGED = """

@dataclass(frozen=True)
class Changed(Copying):
    def batch(self, size, draw, device):
        tokens, targets = super().batch(size, draw, device)
        return CHANGE, targets

    def metric(self, outputs, targets):
        return float((outputs.argmax(-1) == targets).float().mean())
"""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("tokens[:, :4]", "inputs of shape (1, 4) for one example, and its length and inputs"),
        (
            "tokens.float()",
            "(torch.float32); give whole numbers from 0 to 7",
        ),
        ("tokens - 8", "give whole numbers from 0 to 7, or declare more inputs"),
        ("tokens", ""),
    ],
)
def test_batches_are_what_the_task_declares(
    gaugelasso: Command, own: Path, change: str, message: str
) -> None:
    with (own.parent / "my_tasks.py").open("a") as file:
        file.write(CHANGED.replace("CHANGE", change))
    widths = "width = 8\nlayers = 1\nheads = 2\nd_k = 4\nd_v = 4\nd_f = 8"
    text = own.read_text().replace('"my_tasks.py:Regression"', '"my_tasks.py:Changed"')
    text = text.replace('module = "my_models.py:build"\nhidden = 24', widths)
    own.write_text(text.replace("loss = 0.5", "loss = 9.0"))
    out = own.parent / "run"
    answer = gaugelasso("train", own, "--out", out)
    if message:
        assert_user_error(answer, message)
        assert not out.exists()
    else:  # a metric may be a number
        assert answer[0] == 0, answer[2]
        assert 0 <= read(out / "summary.json")["metric"]["value"] <= 1


def test_errors_are_one_line_and_leave_nothing_behind(gaugelasso: Command, own: Path) -> None:
    out = own.parent / "run"
    for change, message in (
        ("task.module=gone.py:Task", "no such file"),
        ("model.module=my_models.py:raising", "unknown key model.hidden"),
    ):
        if "my_models" in change:
            change = change.replace("my_models", str(own.parent / "my_models"))
        assert_user_error(gaugelasso("train", own, "--out", out, "--set", change), message)
    assert not out.exists()


def test_the_built_in_transformer_has_a_name(tmp_path: Path) -> None:
    named = Config.from_dict({"task": {"name": "noise"}, "model": {"name": "transformer"}})
    assert named == Config.from_dict({"task": {"name": "noise"}})
    assert "name" not in named.to_dict()["model"]


def test_imported_code_is_not_run_again(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that is running, or a module that the user imported, is used as it is."""
    monkeypatch.syspath_prepend(own.parent)
    module = importlib.import_module("my_tasks")
    try:
        by = NamedBy(own.parent)
        assert Reference.parse("task.module", f"{FILE}:Copying", by).load(by) is module.Copying
        # Also if the file has moved since.
        moved = Reference("task.module", "/elsewhere/my_tasks.py", "Copying")
        assert moved.load(NamedBy(own.parent, own.parent)) is module.Copying
        assert class_reference(module.Copying) == f"{own.parent.resolve()}/{FILE}:Copying"
    finally:
        del sys.modules["my_tasks"]


# --- entry points ---------------------------------------------------------------------


def install(folder: Path, package: str, lines: str) -> None:
    """A distribution on the path, as pip would leave it."""
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(lines)


@pytest.fixture
def installed(own: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    site = own.parent.parent / "site"
    package = site / "a_package_of_tasks"
    package.mkdir(parents=True)
    for name in ("my_tasks.py", "my_models.py"):
        (package / name).write_text(
            (own.parent / name).read_text().replace("from beside", "from .beside")
        )
    (package / "beside.py").write_text("SCALE = 0.5\n")
    (package / "__init__.py").write_text("")
    install(
        site,
        "some-tasks",
        "[gaugelasso.tasks]\n"
        "copying = a_package_of_tasks.my_tasks:Copying\n"
        "regression = a_package_of_tasks.my_tasks:Regression\n"
        "retrieval = a_package_of_tasks.my_tasks:Copying\n"
        "absent = a_package_of_tasks.nothing:Copying\n"
        "[gaugelasso.models]\n"
        "perceptron = a_package_of_tasks.my_models:build\n",
    )
    monkeypatch.syspath_prepend(site)
    return site


def test_installed_packages_add_names(installed: Path) -> None:
    data = {"task": {"name": "regression"}, "model": {"name": "perceptron", "hidden": 5}}
    config = Config.from_dict(data)
    assert config.task_name == "regression"
    assert config.to_dict()["task"] == {"name": "regression", "inputs": 4, "outputs": 2}
    assert config.to_dict()["model"] == {"name": "perceptron", "hidden": 5, "note": "plain"}
    assert Config.from_dict(config.to_dict()).to_dict() == config.to_dict()
    model = config.model.build(config.task, 0)
    assert class_reference(type(model)) == "a_package_of_tasks.my_models:Perceptron"


def test_built_in_names_win(installed: Path) -> None:
    config = Config.from_dict({"task": {"name": "retrieval"}})
    assert type(config.task).__name__ == "Retrieval"


def test_errors_of_entry_points(installed: Path, tmp_path: Path, monkeypatch: Any) -> None:
    with pytest.raises(
        UserError, match=r"one of: .*noise, tokens, masked_tokens, absent, copying, regression"
    ):
        Config.from_dict({"task": {"name": "copyin"}})
    with pytest.raises(
        UserError, match=r"a_package_of_tasks.nothing:Copying' of 'some-tasks' raised"
    ):
        Config.from_dict({"task": {"name": "absent"}})
    install(tmp_path / "second", "more-tasks", "[gaugelasso.tasks]\ncopying = other:Task\n")
    monkeypatch.syspath_prepend(tmp_path / "second")
    with pytest.raises(UserError, match="'more-tasks' and 'some-tasks' both declare this name"):
        Config.from_dict({"task": {"name": "copying"}})
