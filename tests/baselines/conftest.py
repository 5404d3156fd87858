"""What the tests of rivals begin with."""

from pathlib import Path

import pytest

from tests.tiny_runs import finished


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A full model, trained without pressure."""
    return finished(tmp_path, compress__solver="fixed", target__loss=1e30)
