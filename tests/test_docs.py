"""The pages describe the code as it is: keys, names, links, commands and programs in them."""

import ast
import dataclasses
import functools
import hashlib
import importlib
import importlib.util
import json
import re
import shlex
import textwrap
import tomllib
import types
import typing
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import typer

import gaugelasso
from gaugelasso import axes, load_model
from gaugelasso.cli import app
from gaugelasso.compress import reference
from gaugelasso.config import Config, ModelConfig, load_config
from gaugelasso.plugins import NamedBy
from gaugelasso.sweeps.arms import parse_arms
from gaugelasso.tasks import TASKS, Draw, Retrieval
from gaugelasso.training.trainer import Trainer
from tests.command import run_process
from tests.examples import example
from tests.importing.bases import write_base

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = [README, *sorted(DOCS.rglob("*.md"))]
# Pages that single tests read.
CONFIGURATION = DOCS / "reference" / "configuration.md"
EQUATIONS = DOCS / "reference" / "equations.md"
COMMAND_LINE = DOCS / "reference" / "command-line.md"
RUN_FOLDER = DOCS / "reference" / "run-folder.md"
PYTHON_API = DOCS / "reference" / "python-api.md"
OWN_TASK = DOCS / "how-to" / "own-task.md"
OWN_LOOP = DOCS / "how-to" / "own-loop.md"
OWN_MODEL = DOCS / "how-to" / "own-model.md"
SERVING = DOCS / "how-to" / "serving.md"
WHERE_THINGS_ARE = DOCS / "development" / "where-things-are.md"
FROZEN = "0d512436b8db9da9211e154cec39952f93d0bbd3909863a5b565cfdbbba19075"
EXAMPLES = sorted((ROOT / "examples").glob("your_*.py"))
TASK_EXAMPLES = [ROOT / "configs" / name / "small.toml" for name in ("sorting", "addition")]
SECTIONS: dict[str, Any] = {
    name: cls for name, cls in typing.get_type_hints(Config).items() if "task" not in name
} | {"model": ModelConfig}
_BLOCK = re.compile(
    r"(?:<!-- (?P<mark>[^>]+) -->\n)?^```(?P<kind>\w+)\n(?P<text>.*?)^```", re.M | re.S
)


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block of a page; `mark` is the comment right before it."""

    page: Path
    kind: str
    text: str
    mark: str | None

    def __str__(self) -> str:
        return f"{self.page.stem}: {self.text.strip().splitlines()[0][:40]}"


def blocks(page: Path) -> list[Block]:
    return [Block(page, m["kind"], m["text"], m["mark"]) for m in _BLOCK.finditer(read(page))]


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def rows(text: str) -> list[list[str]]:
    """The cells of every row of the tables in a text, heads and rules left out."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rules = [k for k, line in enumerate(lines) if set(line) <= set("|-: ")]
    kept = [line for k, line in enumerate(lines) if k not in rules and k + 1 not in rules]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in kept]


def under(heading: str, page: Path) -> str:
    """The text between a heading and the next one."""
    _, found, rest = read(page).partition(f"\n{heading}\n")
    assert found, f"{page.name} has no heading {heading!r}"
    return re.split(r"^#+ ", rest, maxsplit=1, flags=re.M)[0]


ALL_BLOCKS = [block for page in PAGES for block in blocks(page)]
PYTHON = [block for block in ALL_BLOCKS if block.kind == "python"]


# --- configuration --------------------------------------------------------------------

KEYED = {f"## `[{name}]`": cls for name, cls in SECTIONS.items()}
KEYED |= {f"### `{name}`": cls for name, cls in TASKS.items()}


def toml(value: Any) -> str:
    return json.dumps(value)


@pytest.mark.parametrize("heading", KEYED)
def test_every_key_is_described_with_its_default(heading: str) -> None:
    cls = KEYED[heading]
    hints = typing.get_type_hints(cls)
    described = {row[0].strip("`"): row for row in rows(under(heading, CONFIGURATION))}
    fields = {field.name: field for field in dataclasses.fields(cls)}
    assert described.keys() == fields.keys()
    said = {int: "whole number", float: "number", bool: "true or false", str: "string"}
    for name, field in fields.items():
        _, kind, default, meaning, valid = described[name]
        assert meaning, name
        assert default == ("none" if field.default is None else f"`{toml(field.default)}`"), name
        optional = isinstance(hints[name], types.UnionType)  # None: the key is not given
        hint = typing.get_args(hints[name])[0] if optional else hints[name]
        if typing.get_origin(hints[name]) is Literal:
            assert valid == ", ".join(f"`{choice}`" for choice in typing.get_args(hints[name]))
        else:
            assert kind == said[hint], name


def test_automatic_values_are_those_of_the_example() -> None:
    example_config = next(block.text for block in blocks(CONFIGURATION) if block.kind == "toml")
    resolved = Config.from_dict(tomllib.loads(example_config)).to_dict()
    described = rows(under("### Automatic values", CONFIGURATION))
    assert len(described) == 8
    for key, _, value in described:
        section, _, name = key.strip("`").partition(".")
        assert tomllib.loads(f"value = {value.strip('`')}")["value"] == pytest.approx(
            resolved[section][name]
        ), key


def test_every_task_is_described() -> None:
    name, module = rows(under("## `[task]`", CONFIGURATION))
    assert module[0] == "`module`"
    assert name[-1] == ", ".join(f"`{task}`" for task in TASKS)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_keys_named_in_prose_exist(page: Path) -> None:
    for section, key in re.findall(r"`(model|target|compress|train)\.(\w+)", read(page)):
        names = {field.name for field in dataclasses.fields(SECTIONS[section])}
        names |= {"module", "name", "from", "context", "sha256"} if section == "model" else set()
        # `model` is also what programs call a model.
        # And the name of a package is also that of a section.
        package = section == "compress"
        module = package and importlib.util.find_spec(f"gaugelasso.{section}.{key}")
        if section == "model" and key in {
            *dir(torch.nn.Module),
            "safetensors",
            "onnx",
            "pt2",
            "spec",
        }:
            continue
        assert module or key in names, f"{section}.{key}"


@pytest.mark.parametrize("block", [b for b in ALL_BLOCKS if b.kind == "toml"], ids=str)
def test_configs_on_pages_are_valid(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tomllib.loads(block.text)
    if base := data.get("model", {}).get("from"):
        monkeypatch.chdir(tmp_path)
        write_base(tmp_path / "made", context=data["task"]["length"]).rename(_parent(base))
    if "module" in data["task"]:
        write_task(block.page, tmp_path / data["task"]["module"].partition(":")[0])
    config = Config.from_dict(data, NamedBy(tmp_path))
    assert config.to_dict()["train"]["steps"] == data["train"]["steps"]


def _parent(path: str) -> Path:
    """The path, with the folders that lead to it."""
    Path(path).parent.mkdir(parents=True)
    return Path(path)


def write_task(page: Path, path: Path) -> None:
    """Save the first program of a page, as the page says."""
    path.write_text(next(block.text for block in blocks(page) if block.mark == "runnable"))


# --- names, links, commands -----------------------------------------------------------


def resolve(name: str) -> Any:
    """The object that a dotted name, relative to the package, stands for."""
    parts = ["gaugelasso", *name.removeprefix("gaugelasso.").split(".")]
    for end in range(len(parts) - 1, 0, -1):
        try:
            thing: Any = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            thing = getattr(thing, part)
        return thing
    raise AssertionError(name)


EQUATION_ROWS = rows(read(EQUATIONS).partition("## Differences")[0])
# Reference -> the functions that run in its place, as the page has them.
REFERENCES: dict[str, set[str]] = {}
for _, reference_cell, runs_cell, _ in EQUATION_ROWS:
    if reference_cell != "–":
        REFERENCES.setdefault(reference_cell.strip("`"), set()).add(runs_cell.strip("`"))


def test_every_equation_has_one_function_that_exists() -> None:
    assert len(EQUATION_ROWS) > 40
    for paper, plain, runs, _ in EQUATION_ROWS:
        if runs != "not implemented":
            assert re.fullmatch(r"`[\w.]+`", runs), paper
            assert callable(resolve(runs.strip("`"))), paper
            assert not runs.startswith("`compress.reference."), paper
        if plain != "–":
            assert re.fullmatch(r"`compress\.reference\.\w+`", plain), paper
            assert callable(resolve(plain.strip("`"))), paper


def test_every_reference_is_on_the_equations_page() -> None:
    tree = ast.parse(read(Path(reference.__file__)))
    public = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    public = {f"compress.reference.{name}" for name in public if not name.startswith("_")}
    assert public == REFERENCES.keys()


@functools.cache
def functions_of_tests() -> list[str]:
    """The source of every test function."""
    sources = []
    for path in (ROOT / "tests").rglob("test_*.py"):
        text = read(path)
        lines = text.splitlines(keepends=True)
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                sources.append("".join(lines[node.lineno - 1 : node.end_lineno]))
    return sources


@pytest.mark.parametrize("name", REFERENCES)
def test_a_test_compares_every_reference_with_what_runs(name: str) -> None:
    """Some test function calls both the reference and a function that the page names for it."""
    runs = {full.rpartition(".")[2] for full in REFERENCES[name]}
    call = f"reference.{name.rpartition('.')[2]}("
    for source in functions_of_tests():
        if call in source and any(re.search(rf"\b{each}\(", source) for each in runs):
            return
    raise AssertionError(f"no test calls {name} and one of {sorted(runs)}")


def test_every_name_on_the_equations_page_exists() -> None:
    named = re.findall(r"`([a-z_]+(?:\.\w+)+)`", read(EQUATIONS))
    for name in named:
        if name.rpartition(".")[2] not in {"json", "py", "toml", "md"}:
            resolve(name)


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", read(page), flags=re.M | re.S)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.+)$", read(target), re.M)
            assert anchor in map(slug, headings), link


COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def commands(program: str, pages: list[Path] = PAGES) -> list[str]:
    """The lines in shell blocks that call a program, each once."""
    shell = [block for page in pages for block in blocks(page) if block.kind == "sh"]
    lines = [line for block in shell for line in block.text.replace("\\\n", "").splitlines()]
    return list(dict.fromkeys(line for line in lines if line.startswith(f"{program} ")))


@pytest.mark.parametrize("line", commands("gaugelasso"))
def test_commands_on_pages_are_understood(line: str) -> None:
    _, name, *arguments = shlex.split(line)
    command = COMMANDS[name]
    # Parses, or raises; runs nothing.
    context = command.make_context(name, arguments)
    for change in context.params.get("set_") or []:
        section, _, key = change.partition("=")[0].partition(".")
        classes = TASKS.values() if section == "task" else [SECTIONS[section]]
        assert key in {f.name for cls in classes for f in dataclasses.fields(cls)}, change
    config = context.params.get("config")
    # There by an earlier command, or a config that a page shows.
    if config and config.parts[0] not in ("runs", "smol.toml"):
        assert (ROOT / config).exists()
        for arm in parse_arms(context.params.get("arm") or [], ROOT):
            load_config(ROOT / config, dict(change.split("=") for change in arm.changes))


def test_every_command_has_an_example_on_its_page() -> None:
    lines = commands("gaugelasso", [COMMAND_LINE])
    assert {line.split()[1] for line in lines} == COMMANDS.keys()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_of_a_command_is_described(name: str) -> None:
    cells = [row[0] for row in rows(under(f"## {name}", COMMAND_LINE))]
    described = re.findall(r"`(--[\w-]+)", " ".join(cells))
    options = {opt for param in COMMANDS[name].params for opt in param.opts if opt[:2] == "--"}
    assert sorted(described) == sorted(options - {"--help"})


@pytest.mark.parametrize("line", commands("make"))
def test_make_targets_on_pages_exist(line: str) -> None:
    assert re.search(rf"^{line.split()[1]}:", read(ROOT / "Makefile"), re.M)


def test_every_block_says_what_it_is() -> None:
    # A block without a language is one that no test looks at.
    for page in PAGES:
        assert len(blocks(page)) == len(re.findall(r"^```", read(page), re.M)) / 2, page.name


def error_templates() -> list[str]:
    """What the axes package can raise, with … for the parts that vary."""
    templates = []
    files = sorted(Path(axes.__file__).parent.glob("*.py"))
    for node in (node for file in files for node in ast.walk(ast.parse(read(file)))):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            if not node.exc.args:
                continue
            message = node.exc.args[0]
            parts = message.values if isinstance(message, ast.JoinedStr) else [message]
            templates.append(
                "".join(str(p.value) if isinstance(p, ast.Constant) else "…" for p in parts)
            )
    return templates


def test_errors_are_explained() -> None:
    explained = [
        row[0].strip("`").replace("'", "") for row in rows(under("## What errors mean", OWN_MODEL))
    ]
    patterns = [re.compile(".*".join(map(re.escape, text.split("…")))) for text in explained]
    templates = error_templates()
    assert len(templates) > 10
    for template in templates:
        assert any(p.search(template) for p in patterns), f"not explained: {template}"
    for text, pattern in zip(explained, patterns, strict=True):
        assert any(map(pattern.search, templates)), f"no longer raised: {text}"


def test_every_public_name_is_on_its_page() -> None:
    documented = set(re.findall(r"^::: gaugelasso\.(\w+)$", read(PYTHON_API), re.M))
    assert documented == {*gaugelasso.__all__} - {"__version__"}
    for name in re.findall(r"^::: ([\w.]+)$", read(PYTHON_API), re.M):
        resolve(name)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("checkpoint", "runs.checkpoint"),
        ("compressor", "compress.compressor"),
        ("display", "cli.display"),
        ("drop", "compress.drop"),
        ("gauge", "compress.gauge"),
        ("guard", "compress.guard"),
        ("optim", "compress.optim"),
        ("options", "compress.options"),
        ("penalty", "compress.penalty"),
        ("pricing", "compress.pricing"),
        ("ranks", "distributed"),
        ("schedule", "training.schedule"),
        ("solver", "compress.solver"),
        ("split", "compress.split"),
        ("step", "training.step"),
        ("surgery", "compress.surgery"),
        ("tasks.streams", "tasks.protocol"),
        ("trainer", "training.trainer"),
    ],
)
def test_paths_of_earlier_pages_still_import(old: str, new: str) -> None:
    former, present = (importlib.import_module(f"gaugelasso.{path}") for path in (old, new))
    assert former is present


def test_every_package_has_its_row() -> None:
    package = Path(axes.__file__).parents[1]
    cells = [row[0].strip("`") for row in rows(under("## The packages", WHERE_THINGS_ARE))]
    there = {f"{path.name}/" for path in package.iterdir() if (path / "__init__.py").exists()}
    there |= {path.name for path in package.glob("*.py")} - {"__init__.py", "__main__.py"}
    assert set(cells) == there


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_files_named_on_pages_exist(page: Path) -> None:
    # The log is history: it names files by the paths of its time.
    if page.name == "log.md":
        return
    folders = "src|tests|docs|configs|examples|benchmarks|results"
    for path in re.findall(rf"`((?:{folders})/[\w./-]+)", read(page)):
        new = path.startswith(("configs/running_max", "src/gaugelasso/tasks/running_max"))
        assert new or (ROOT / path).exists(), path


def test_the_corpus_of_the_small_text_config_is_frozen() -> None:
    # The figures of configs/charlm/small.toml depend on every byte of it.
    folder = ROOT / load_config(ROOT / "configs/charlm/small.toml").to_dict()["task"]["path"]
    joined = b"".join(path.read_bytes() for path in sorted(folder.iterdir()))
    assert hashlib.sha256(joined).hexdigest() == FROZEN


# --- programs -------------------------------------------------------------------------


def run_page(page: Path) -> types.ModuleType:
    """A module made of the page's runnable blocks, in order."""
    module = types.ModuleType(f"docs_{page.stem.replace('-', '_')}")
    for block in blocks(page):
        if block.mark == "runnable":
            exec(compile(block.text, str(page), "exec"), module.__dict__)
    return module


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_python_on_pages_compiles(block: Block) -> None:
    ast.parse(textwrap.dedent(block.text))


QUOTES = [block for block in PYTHON if (block.mark or "").startswith("from ")]


@pytest.mark.parametrize("block", QUOTES, ids=str)
def test_quotes_are_verbatim(block: Block) -> None:
    assert block.text in read(ROOT / str(block.mark).removeprefix("from "))


def test_marks_are_known() -> None:
    for block in ALL_BLOCKS:
        mark = block.mark or "runnable"
        assert mark == "runnable" or mark.startswith("from examples/"), mark


def test_the_loop_on_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = (block for block in blocks(README) if block.kind == "python")
    text, steps = block.text.replace("steps=2000", "steps=40"), 40
    assert text != block.text
    generator = torch.Generator().manual_seed(0)
    batches = torch.randint(16, (steps, 2, 2, 16), generator=generator)
    names: dict[str, Any] = {"batches": batches}  # random targets: there is nothing to learn
    with pytest.warns(gaugelasso.TargetMissedWarning, match="0.25 was missed"):
        exec(compile(text, str(README), "exec"), names)
    assert names["result"].steps == steps
    assert not names["result"].held
    assert f"{names['compressor'].fma_initial:,.0f} ->" in capsys.readouterr().out


def test_the_program_on_the_serving_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    program = next(block.text for block in blocks(SERVING) if block.mark == "runnable")
    exec(compile(program, str(SERVING), "exec"), {})
    accuracy, texts = capsys.readouterr().out.splitlines()
    assert "the likeliest is the same in 100.00%" in accuracy
    assert all(1 <= len(text) <= 20 for text in json.loads(texts))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_run(path: Path) -> None:
    with pytest.warns(gaugelasso.TargetMissedWarning):  # too short to learn anything
        compressor = example(path.stem).main(steps=40)
    assert compressor.steps == 40
    assert all(parameter.isfinite().all() for parameter in compressor.model.parameters())


@pytest.mark.parametrize("path", TASK_EXAMPLES, ids=lambda path: path.parent.name)
def test_example_tasks_train(path: Path, tmp_path: Path) -> None:
    short = {"steps": 8, "warmup": 2, "cooldown": 2, "batch": 4, "final_batches": 1}
    changes = {f"train.{key}": str(value) for key, value in short.items()} | {
        "target.loss": "99",
        "target.hold": "pressed",
    }
    config = load_config(path, changes | {"train.eval_every": "4", "train.device": "cpu"})
    summary = Trainer(config, tmp_path / "run").run()
    assert summary["steps"] == 8
    assert 0 <= summary["metric"]["value"] <= 1


def test_the_sorting_example_sorts() -> None:
    task = load_config(TASK_EXAMPLES[0]).task
    tokens, targets = task.batch(5, Draw(1), "cpu")
    symbols, separator, answers = tokens[:, :8], tokens[:, 8], tokens[:, 9:]
    assert torch.equal(targets, symbols.sort(dim=1).values)
    assert torch.equal(answers, targets[:, :-1])
    assert (separator == 16).all()
    outputs = torch.nn.functional.one_hot(targets, 16) * 50.0
    outputs = torch.cat([torch.zeros(5, 8, 16), outputs], dim=1)
    assert task.loss(outputs, targets) < 1e-6
    assert task.metric(outputs, targets) == 1
    outputs[0, 8] = outputs[0, 8].roll(1)
    assert task.metric(outputs, targets) == pytest.approx(4 / 5)


def test_the_addition_example_keeps_its_streams_apart() -> None:
    task: Any = load_config(TASK_EXAMPLES[1]).task
    parts = [set(part.tolist()) for part in task.parts()]
    assert set.union(*parts) == set(range(97 * 97))
    assert sum(map(len, parts)) == 97 * 97
    for stream, part in enumerate(parts):
        tokens, targets = task.batch(50, Draw(1, 2, stream), "cpu")
        assert torch.equal(targets, tokens[:, :2].sum(dim=1) % 97)
        assert set((tokens[:, 0] * 97 + tokens[:, 1]).tolist()) <= part
    for wrong in ({"held_out": 0.0}, {"held_out": 1.0}, {"modulus": 1}, {"held_out": float("nan")}):
        with pytest.raises(gaugelasso.UserError, match=next(iter(wrong))):
            type(task)(**wrong)


def test_the_task_on_its_page_trains(tmp_path: Path) -> None:
    # A target that is always met, so that compression is on after warm-up.
    page = run_page(OWN_TASK)
    summary = page.main(tmp_path / "run", steps=60, loss_target=100.0)
    assert summary["steps"] == 60
    assert len(read(tmp_path / "run" / "events.jsonl").splitlines()) == 1
    check_run_folder_page(tmp_path / "run", summary)


def check_run_folder_page(run: Path, summary: dict[str, Any]) -> None:
    """Every file of a run, and every key of its rows and its summary, is on the page."""
    described = set(re.findall(r"`([\w.-]+)/?`", read(RUN_FOLDER)))
    (checkpoint, *_) = (run / "checkpoints").iterdir()
    files = {path.name for folder in (run, checkpoint) for path in folder.iterdir()}
    assert files <= described, files - described
    metric = {summary["metric"]["name"]}
    for log in ("metrics.jsonl", "events.jsonl"):
        row = json.loads(read(run / log).splitlines()[0])
        assert row.keys() - metric <= described, row.keys() - described
    assert summary.keys() <= described, summary.keys() - described


def test_the_loop_on_its_page_saves_what_can_be_loaded(tmp_path: Path) -> None:
    page = run_page(OWN_LOOP)
    compressor = page.own_loop(tmp_path / "checkpoint", steps=80, loss_target=100.0)
    assert compressor.history
    model = load_model(tmp_path / "checkpoint")
    assert model.structure() == compressor.structure
    inputs, _ = Retrieval(vocabulary=16, modulus=4, length=16).batch(2, Draw(0), "cpu")
    with torch.no_grad():
        assert torch.equal(model.eval()(inputs), compressor.model.eval()(inputs))


def test_the_running_maximum_is_one() -> None:
    task = run_page(OWN_TASK).RunningMax(vocabulary=9, length=7)
    tokens, labels = task.batch(3, Draw(5), "cpu")
    for position in range(7):
        assert torch.equal(labels[:, position], tokens[:, : position + 1].amax(dim=1))


def test_the_models_on_the_model_page_pass_the_check() -> None:
    """The page checks the transformer itself."""
    page = run_page(OWN_MODEL)
    assert page.result.passed
    tokens = torch.arange(6)
    torch.manual_seed(0)
    result = gaugelasso.check(page.Tied(words=6, width=4), (tokens, tokens))
    assert result.passed, str(result)


def test_a_task_is_named_as_the_page_describes(tmp_path: Path) -> None:
    write_task(OWN_TASK, tmp_path / "running_max.py")
    config = tmp_path / "running_max.toml"
    config.write_text(next(block.text for block in blocks(OWN_TASK) if block.kind == "toml"))
    short = [f"train.{key}" for key in ("steps=20", "warmup=5", "cooldown=5", "final_batches=1")]
    changes = [word for change in (*short, "target.loss=9") for word in ("--set", change)]
    code, _, err = run_process("train", config, "--out", tmp_path / "run", *changes)
    assert code == 0, err
    assert json.loads(read(tmp_path / "run" / "summary.json"))["task"] == "RunningMax"
