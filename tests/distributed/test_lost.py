"""A rank dies, hangs, or holds another state: the others leave soon, and say why.

Once here; `make torture` does it twenty times.
"""

import time
from pathlib import Path

from tests.distributed.crews import CANONICAL, Crews, Fault
from tests.tiny_runs import assert_same_run, outcome


def assert_left(crews: Crews, name: str, fault: Fault, size: int, message: str) -> float:
    """All ranks but the victim leave with code 2 and one line; returns the seconds it took."""
    crew = crews.start(name, size, fault=fault)
    victim = crew.processes[fault.rank]
    while fault.kind == "kill" and victim.is_alive():
        time.sleep(0.005)
    began = time.perf_counter()
    codes = crew.wait()
    took = time.perf_counter() - began
    for rank in set(range(size)) - {fault.rank}:
        assert codes[rank] == 2, crews.log(name, rank)
        errors = [line for line in crews.log(name, rank).splitlines() if "error:" in line]
        assert len(errors) == 1, errors
        assert message in errors[0]
        assert "--resume" in errors[0]
        assert "Traceback" not in crews.log(name, rank)
    return took


def test_a_killed_rank_is_named_and_the_run_goes_on(crews: Crews) -> None:
    fault = Fault("kill", 2, 10)
    assert assert_left(crews, "killed", fault, 4, "rank 2 is gone") < 30
    assert_same_run(crews.home / "one", crews.finish("killed", 1, "--resume"))


def test_a_hanging_rank_is_given_up(tmp_path: Path) -> None:
    # Bounds every exchange of those that do not hang, too, on a machine that does much else.
    crews = Crews(tmp_path, (*CANONICAL, "train.rank_timeout=5"))
    assert_left(crews, "hanging", Fault("hang", 1, 5), 2, "rank 1 is gone (Timed out")


def test_a_weight_that_differs_by_one_bit_stops_all_at_once(crews: Crews) -> None:
    """Step 9 ends in an event."""
    message = "rank 1 is not in the state of rank 0 before the event of step 9"
    assert crews.run("odd", 2, fault=Fault("perturb", 1, 8)) == [2, 2]
    for rank in range(2):
        assert message in crews.log("odd", rank)
        assert "Traceback" not in crews.log("odd", rank)


def test_all_skip_and_go_back_together(tmp_path: Path) -> None:
    """One rank's losses are no numbers, and so the means of all are not."""
    crews = Crews(tmp_path, (*CANONICAL, "train.skip_limit=3"))
    for size in (1, 2):
        fault = Fault("nan", size - 1, 10)
        assert crews.run(str(size), size, fault=fault) == [0] * size, crews.logs(str(size))
    assert outcome(tmp_path / "2")["returns"] == 1
    assert outcome(tmp_path / "2")["skipped_steps"] == 3
    assert_same_run(tmp_path / "1", tmp_path / "2")


def test_torchrun_goes_on_exactly(crews: Crews) -> None:
    done = crews.torchrun("restarted", 2, [Fault("kill", 1, 10)])
    assert done.returncode == 0, done.stderr
    assert "rank 1 is gone" in done.stderr
    # torch seeds its own generator anew in a process that was not forked.
    assert_same_run(crews.home / "one", crews.home / "restarted", ("model", "optimizer"))


def test_an_error_of_the_first_rank_is_told_by_all(crews: Crews) -> None:
    """The folder is there already: nobody waits for a rank 0 that has left."""
    (crews.home / "taken").mkdir()
    (crews.home / "taken" / "config.json").write_text("{}")
    assert crews.run("taken", 2) == [2, 2]
    for rank in range(2):
        assert "already exists; add --resume" in crews.log("taken", rank)
