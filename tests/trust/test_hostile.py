"""Damaged files, by chance or on purpose: refused in one line, and no code in them is run.

Some hundreds of mutants here; `make torture` tries thousands and measures their memory.
"""

import gzip
import io
import json
import os
from pathlib import Path

import numpy as np
import pytest

from gaugelasso.errors import UserError
from gaugelasso.files import untrusted
from gaugelasso.runs.checkpoint import load_spec
from gaugelasso.training.trainer import Trainer
from tests.tiny import TINY, tiny
from tests.tiny_runs import start, stop_at
from tests.trust import damage, heavy
from tests.trust.mutants import (
    Patient,
    blind_arrays,
    blind_configs,
    blind_texts,
    lone_structures,
    met_array,
    met_text,
    mutants,
    refusal,
    refused_config,
    refused_structure,
)


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Patient:
    home = tmp_path_factory.mktemp("patient")
    stop_at(start(home), 25)
    return Patient(tiny(home), home / "run", "step-00000020")


@pytest.fixture(autouse=True)
def canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that a pickle would create if it was loaded."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GAUGELASSO_CACHE", str(tmp_path / "cache"))
    return tmp_path / damage.CANARY


def test_the_bomb_goes_off(canary: Path) -> None:
    """Otherwise the tests below could not fail."""
    call, arguments = damage.Bomb().__reduce__()
    call(*arguments)
    assert canary.exists()


def test_the_patient_is_well(patient: Patient, tmp_path: Path) -> None:
    """Otherwise every damage would be refused for another reason."""
    trainer = Trainer(patient.config, patient.copy(tmp_path), "resume")
    assert trainer.compressor.steps == 20
    trainer.folder.close()


def test_spoiled_checkpoints_are_refused(patient: Patient, tmp_path: Path, canary: Path) -> None:
    ring = patient.run / "checkpoints"
    tried = list(mutants(ring / "step-00000020", ring / "step-00000010", often=1, most=1))
    assert len(tried) > 120
    met = {str(mutant): refusal(patient, mutant, tmp_path) for mutant in tried}
    assert {name: message for name, message in met.items() if message} == {}
    assert not canary.exists()


def test_spoiled_structures_are_refused(patient: Patient, tmp_path: Path) -> None:
    good = patient.run / "checkpoints" / "step-00000020" / "structure.json"
    tried = list(lone_structures(good, most=20))
    assert len(tried) > 100
    met = {name: refused_structure(text, tmp_path / "structure.json") for name, text in tried}
    assert {name: message for name, message in met.items() if message} == {}


def test_spoiled_configs_are_refused_or_mean_something_else(tmp_path: Path) -> None:
    tried = list(blind_configs(TINY.encode(), often=30))
    met = [refused_config(text, tmp_path / "config.toml") for _, text in tried]
    assert {message for message in met if message} <= {"accepted"}
    assert met.count(None) > 0.8 * len(met)


def test_spoiled_data_is_refused_or_the_same(tmp_path: Path, canary: Path) -> None:
    met = [met_text(data, suffix, tmp_path) for suffix, data in blind_texts(often=10)]
    met += [met_array(data, tmp_path) for data in blind_arrays(often=10)]
    assert {message for message in met if message} <= {"the same"}
    assert met.count(None) > 0.8 * len(met)
    assert not canary.exists()


def test_a_structure_must_fit_into_memory(patient: Patient, tmp_path: Path) -> None:
    spec = load_spec(patient.run / "checkpoints" / "step-00000020")
    data = spec.to_dict() | {"inputs": 2**39}
    path = tmp_path / "structure.json"
    path.write_text(json.dumps(data))
    with pytest.raises(UserError, match="of memory of this machine can hold"):
        load_spec(path)


def test_a_pipe_is_no_structure(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "structure.json")
    with pytest.raises(UserError, match="not a regular file"):
        load_spec(tmp_path / "structure.json")


def test_an_endless_file_is_no_structure(tmp_path: Path) -> None:
    with (tmp_path / "structure.json").open("wb") as file:
        file.truncate(2**33)  # a sparse file: it takes no disk space
    with pytest.raises(UserError, match="too many"):
        load_spec(tmp_path / "structure.json")


def test_no_file_takes_much_more_memory_than_it_has_bytes(patient: Patient, tmp_path: Path) -> None:
    met = {
        f"{kind.file}: {name}": heavy.weigh(patient, kind, data, tmp_path)
        for kind in heavy.kinds(patient)
        for name, data in heavy.contents(kind)
    }
    assert len(met) > 15
    assert {name: message for name, message in met.items() if message} == {}


def test_the_scales_show_a_file_that_grows(patient: Patient, tmp_path: Path) -> None:
    """Otherwise the test above could not fail."""
    kind = heavy.Kind("x.json", lambda run: json.loads((run / "x.json").read_bytes()))
    [(_, data)] = heavy.contents(kind)
    assert heavy.weigh(patient, kind, data, tmp_path) == "accepted"
    kept = kind.read(tmp_path / "run")  # in memory that was freed before, which it keeps in use
    with heavy.Peak() as peak:
        assert kind.read(tmp_path / "run") == kept
    assert peak.bytes > 10 * len(data)


def test_a_pipe_keeps_nobody_waiting(patient: Patient, tmp_path: Path) -> None:
    met = {kind.file: heavy.piped(patient, kind, tmp_path) for kind in heavy.kinds(patient)}
    assert {name: message for name, message in met.items() if message} == {}


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl"])
def test_the_clock_shows_a_reader_that_waits(
    patient: Patient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Otherwise the test above could not fail."""
    monkeypatch.setattr(heavy, "PATIENCE", 1)
    monkeypatch.setattr(untrusted, "open_plain", lambda path: path.open("rb"))
    [kind] = [kind for kind in heavy.kinds(patient) if kind.file == name]
    assert heavy.piped(patient, kind, tmp_path) == "waits for ever"


def test_objects_in_an_archive_are_not_loaded(tmp_path: Path, canary: Path) -> None:
    held = io.BytesIO()
    np.savez(held, train_data=np.array([damage.Bomb()], dtype=object))
    assert met_array(held.getvalue(), tmp_path) is None
    assert not canary.exists()


def test_what_is_packed_is_unpacked_to_the_disk(tmp_path: Path) -> None:
    assert met_text(gzip.compress(b"a text\n" * 500), ".gz", tmp_path) == "another text"
