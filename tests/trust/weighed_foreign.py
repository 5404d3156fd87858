"""Thousands of damaged files of other libraries, read as those of `weighed` are."""

import os
from collections import Counter
from pathlib import Path
from typing import Any

from tests.trust import damage
from tests.trust.foreign import MOST_MEMORY, SPECIMENS, met
from tests.trust.memory import Peak
from tests.trust.weighed import hear_code, in_its_own_process

# Of the damaged files in the tests.
_TIMES = 10


def weigh_foreign(home: Path) -> dict[str, Any]:
    """Return all results; if the process died, the last file is the fault."""
    return in_its_own_process(_work, home)


def _work(home: Path, queue: Any) -> None:
    os.chdir(home)
    paths = []
    # All first: what makes them runs code, and so do the imports of their readers.
    for number, specimen in enumerate(SPECIMENS):
        (home / "last").write_text(f"{specimen}, intact")
        folder = home / str(number)
        folder.mkdir()
        paths.append(specimen.make(folder))
        specimen.read(paths[-1])
    tried: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    faults: list[str] = []
    most, heaviest, heard = 0, "", hear_code()
    for specimen, path in zip(SPECIMENS, paths, strict=True):
        damaged = specimen.damaged(path.read_bytes(), _TIMES * specimen.often)
        with Peak() as peak:
            for name, content in damaged:
                (home / "last").write_text(f"{specimen}, {name}")
                end = met(path, content, specimen.read)
                tried[specimen.kind] += 1
                refused[specimen.kind] += end == "refused"
                if end not in ("refused", "read"):
                    faults.append(f"{specimen}, {name}: {end}")
        if peak.bytes > most:
            most, heaviest = peak.bytes, str(specimen)
    if most > MOST_MEMORY:
        faults.append(f"{heaviest}: {most:,} bytes of memory")
    if heard or any(home.rglob(damage.CANARY)):
        faults.append(f"code was run: {dict(heard)}")
    queue.put(
        {
            "tried": sum(tried.values()),
            "by_kind": dict(tried),
            "refused": dict(refused),
            "most_memory_mib": round(most / 2**20, 2),
            "heaviest": heaviest,
            "code_run": dict(heard),
            "faults": faults,
        }
    )
