"""What a run in a loop of your own reports to its recorder."""

import json
from typing import Any

import pytest

from gaugelasso.compress.events import Event
from gaugelasso.compress.pilot import Pilot
from gaugelasso.compress.recording import open_recorder, register_opener
from gaugelasso.compress.result import Result
from tests.compress.own_loops import Loop


class Notes:
    def __init__(self) -> None:
        self.notes: list[Any] = []
        self.work = 0.0

    def prepare(self, model: Any) -> None:
        self.model = model

    def begin(self, pilot: Pilot) -> None:
        self.pilot = pilot

    def event(self, event: Event) -> None:
        self.notes.append(event)

    def step(self, fma: float) -> None:
        self.work += fma

    def due(self) -> bool:
        return False

    def observed(self, losses: list[float]) -> None:
        self.notes.append(losses)

    def interval(self) -> None:
        self.notes.append(self.pilot.course.phase(self.pilot.now - 1))

    def save(self, keep: bool, due: bool) -> None:
        if keep:
            self.notes.append(self.pilot.now)

    def ended(self) -> None:
        self.notes.append("ended")

    def finished(self, result: Result) -> None:
        self.notes.append(result)


def test_a_recorder_hears_of_everything_in_order() -> None:
    recorder = Notes()
    loop = Loop(steps=200, evaluate=True, record=recorder)
    assert recorder.pilot is loop.pilot
    assert recorder.model is loop.model
    result = loop.run()
    notes = recorder.notes
    assert notes[-1] is result
    assert [note for note in notes if isinstance(note, Event)] == loop.compressor.history
    cuts = [event for event in loop.compressor.history if event.step < 200]
    sizes = [352.0, *(event.fma for event in cuts)]
    ends = [*(event.step for event in cuts), 200]
    spans = zip(sizes, [0, *ends[:-1]], ends, strict=True)
    assert recorder.work == sum(fma * (end - start) for fma, start, end in spans)
    losses = [note for note in notes if isinstance(note, list)]
    assert len([note for note in losses if note]) == 100  # every second step
    assert sum(map(len, losses)) == 200
    json.dumps(losses)
    # A state is kept once all losses up to it are known: a checkpoint of it has them.
    kept = [(note, index) for index, note in enumerate(notes) if type(note) is int]
    assert {name for name, _ in kept} >= {52, loop.pilot.course.good_at}
    for name, index in kept:
        assert sum(len(note) for note in notes[:index] if isinstance(note, list)) == name
    # The phase is asked for before the course goes on: it is that of the last steps.
    phases = [note for note in notes if isinstance(note, str)]
    assert len(phases) == 100
    ends = [phases[row["step"] // 2 - 1] for row in result.trials]
    assert ends == ["trial"] * 3
    assert phases[result.trials[0]["step"] // 2] == "compression"


def test_a_folder_is_opened_by_who_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    from gaugelasso.compress import recording

    monkeypatch.setattr(recording, "_opener", [])
    opened = []

    def opener(path: Any, resume: bool) -> Notes:
        opened.append((path, resume))
        return Notes()

    register_opener(opener)
    assert isinstance(open_recorder("runs/mine", True), Notes)
    own = Notes()
    assert open_recorder(own, False) is own
    assert open_recorder(None, False) is None
    assert opened == [("runs/mine", True)]
