"""Loading a file never runs code in it: no pickle in the sources, and none while files are read."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

from tests import warm
from tests.tiny import tiny
from tests.tiny_runs import finished

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src" / "gaugelasso").rglob("*.py"))
# Modules and functions that run code from the data they load.
MODULES = {
    "pickle",
    "cPickle",
    "dill",
    "cloudpickle",
    "joblib",
    "shelve",
    "marshal",
    "runpy",
    "code",
}
CALLS = {"eval", "exec", "compile", "__import__"}
ATTRIBUTES = {
    ("torch", "load"),
    ("torch", "save"),
    ("torch", "hub"),
    ("os", "system"),
    ("os", "popen"),
}


def dangers(source: str) -> list[str]:
    """Return the names in a program that could run the content of a file."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom):
            module = (node.module or "").split(".")[0]
            names = {(module, alias.name) for alias in node.names}
            found += [module] if module in MODULES or names & ATTRIBUTES else []
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found += [node.func.id] if node.func.id in CALLS else []
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            named = (node.value.id, node.attr)
            found += [".".join(named)] if named in ATTRIBUTES else []
        elif isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "shell"):
            is_off = isinstance(node.value, ast.Constant) and node.value.value is False
            found += [] if is_off else [node.arg]
    return found


def test_no_source_can_run_a_file() -> None:
    found = {str(path): dangers(path.read_text(encoding="utf-8")) for path in SOURCES}
    assert {path: names for path, names in found.items() if names} == {}


def test_only_plugins_import_by_name() -> None:
    """What a file names is imported in one place, under the rules of that place."""
    importing = re.compile(r"import_module|exec_module|entry_points\(|spec_from_file_location")
    users = {path.relative_to(ROOT / "src/gaugelasso") for path in SOURCES
             if importing.search(path.read_text(encoding="utf-8"))}  # fmt: skip
    plugins = {Path("plugins/modules.py"), Path("plugins/entry_points.py")}
    # These import from lists of their own: names of this package, and libraries of the extras.
    assert users == plugins | {Path("_moved.py"), Path("export/extras.py")}


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "import torch; torch.load('x')",
        "from torch import load",
        "np.load('x', allow_pickle=True)",
        "np.load('x', allow_pickle=allowed)",
        "eval('1')",
        "exec(text)",
        "import shelve",
        "import marshal as m",
        "os.system('x')",
        "subprocess.run('x', shell=True)",
    ],
)
def test_the_walk_sees_what_it_looks_for(line: str) -> None:
    assert dangers(line)


LOADING = """
import sys
from pathlib import Path
from gaugelasso.runs.checkpoint import load_model, load_spec, load_state
from gaugelasso.config import load_config, run_config
from gaugelasso.report.data import load_run
from gaugelasso.training.trainer import Trainer

run, config = Path(sys.argv[1]), Path(sys.argv[2])

def load():
    load_model(run), load_state(run), load_spec(run), load_spec(run / "initial.json")
    run_config(run), load_run(run)
    Trainer(load_config(config), run, "resume").folder.close()

load()  # so that late imports happen before the check
heard = []
sys.addaudithook(lambda name, _: heard.append(name))
load()
forbidden = {"pickle.find_class", "exec", "compile", "marshal.loads", "os.system", "os.exec",
             "os.posix_spawn", "os.fork", "subprocess.Popen", "socket.connect", "ctypes.dlopen"}
assert "open" in heard
print("ran:", sorted(forbidden & set(heard)))
if sys.argv[3:]:
    import pickle
    pickle.loads(pickle.dumps(Path))
    print("then:", sorted(forbidden & set(heard)))
"""


def test_nothing_is_run_while_a_run_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without it, git would be called for the commit of the source.
    monkeypatch.setenv("GAUGELASSO_COMMIT", "told")
    run = finished(tmp_path)
    tiny(tmp_path)
    command = [warm.python(), "-c", LOADING, str(run), str(tmp_path / "tiny.toml"), "control"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["ran: []", "then: ['pickle.find_class']"], done.stderr
