"""Thousands of damaged files, each read in a process that detects whether code is run."""

import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gaugelasso.errors import UserError
from gaugelasso.runs import checkpoint
from tests.tiny import TINY, tiny
from tests.tiny_runs import start, stop_at
from tests.trust import damage, heavy, mutants
from tests.trust.memory import Peak
from tests.trust.mutants import Patient

# A model whose files are larger than the usual memory changes of an interpreter.
_LARGER = {"task__vocabulary": 4000, "model__width": 128, "train__steps": 60}
_FORBIDDEN = {
    "pickle.find_class", "exec", "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen",
    "socket.connect",
}  # fmt: skip


def weigh_mutants(home: Path) -> dict[str, Any]:
    return in_its_own_process(_work, home)


def in_its_own_process(work: Callable[[Path, Any], None], home: Path) -> dict[str, Any]:
    """Return what `work` puts into its queue; if the process died, its last mutant is the fault."""
    queue: Any = multiprocessing.get_context("spawn").SimpleQueue()
    process = multiprocessing.get_context("spawn").Process(target=work, args=(home, queue))
    process.start()
    process.join()
    if process.exitcode != 0:
        last = (home / "last").read_text()
        return {"faults": [f"the process ended with {process.exitcode} at {last}"]}
    return queue.get()


def hear_code() -> Counter[str]:
    """Count from now on what runs code, a program or a connection in this process, by its name."""
    heard: Counter[str] = Counter()

    def hear(name: str, arguments: tuple[Any, ...]) -> None:
        # A late import runs code, too; its file is a Python source.
        late = name == "exec" and Path(arguments[0].co_filename).is_file()
        if name in _FORBIDDEN and not late:
            heard[name] += 1

    sys.addaudithook(hear)
    return heard


def _work(home: Path, queue: Any) -> None:
    os.chdir(home)
    os.environ["GAUGELASSO_CACHE"] = str(home / "cache")
    stop_at(start(home, **_LARGER), 25)
    patient = Patient(tiny(home, **_LARGER), home / "run", "step-00000020")
    ring = patient.run / "checkpoints"
    newest, older = ring / "step-00000020", ring / "step-00000010"
    size = sum(path.stat().st_size for path in newest.iterdir())
    work = home / "work"
    work.mkdir()
    faults: list[str] = []
    counts: Counter[str] = Counter()
    checkpoint.load_model(newest)
    mutants.refusal(patient, next(mutants.mutants(newest, older, 1, 1)), work)
    heard = hear_code()
    most, heaviest = 0, ""
    for mutant in mutants.mutants(newest, older, often=30, most=10):
        (home / "last").write_text(str(mutant))
        with Peak() as peak:
            _load(patient, mutant, work)
        if peak.bytes > most:
            most, heaviest = peak.bytes, str(mutant)
        message = mutants.refusal(patient, mutant, work)
        counts[f"checkpoint, {'knowing' if mutant.knowing else 'blind'}"] += 1
        faults += [f"{mutant}: {message}"] if message else []
    for name, data in mutants.lone_structures(newest / "structure.json", most=40):
        message = mutants.refused_structure(data, home / "structure.json")
        counts["structure alone"] += 1
        faults += [f"structure alone, {name}: {message}"] if message else []
    accepted: Counter[str] = Counter()
    for name, data in mutants.blind_configs(TINY.encode(), often=100):
        message = mutants.refused_config(data, home / "config.toml")
        counts["config"] += 1
        accepted["config"] += message == "accepted"
        faults += [f"config, {name}: {message}"] if message not in (None, "accepted") else []
    data_met = [mutants.met_text(data, suffix, work) for suffix, data in mutants.blind_texts(100)]
    data_met += [mutants.met_array(data, work) for data in mutants.blind_arrays(100)]
    counts["data"] += len(data_met)
    accepted["data"] += data_met.count("the same")
    faults += [f"data: {message}" for message in data_met if message not in (None, "the same")]
    for kind in heavy.kinds(patient):
        for name, data in heavy.contents(kind):
            (home / "last").write_text(f"{kind.file}, {name}")
            message = heavy.weigh(patient, kind, data, work)
            counts["makes much of little"] += 1
            faults += [f"{kind.file}, {name}: {message}"] if message else []
        message = heavy.piped(patient, kind, work)
        counts["pipe"] += 1
        faults += [f"{kind.file}, a pipe: {message}"] if message else []
    if most > 2 * size:
        faults.append(f"{heaviest}: {most:,} bytes of memory for a checkpoint of {size:,}")
    if heard or any(home.rglob(damage.CANARY)):
        faults.append(f"code was run: {dict(heard)}")
    queue.put(
        {
            "tried": sum(counts.values()),
            "by_kind": dict(counts),
            "a_config_that_means_something_else": accepted["config"],
            "data_that_says_the_same": accepted["data"],
            "checkpoint_mib": round(size / 2**20, 2),
            "most_memory_mib": round(most / 2**20, 2),
            "heaviest": heaviest,
            "code_run": dict(heard),
            "faults": faults,
        }
    )


def _load(patient: Patient, mutant: mutants.Mutant, work: Path) -> None:
    """Measure the reading of files only, not the memory that training then needs."""
    path = patient.copy(work) / "checkpoints" / patient.checkpoint
    mutant.spoil(path)
    try:
        checkpoint.load_model(path)
        checkpoint.load_state(path)
    except UserError:
        pass
