"""One run on one rank, which the others are held to."""

import pytest

from tests.distributed.crews import Crews


@pytest.fixture(scope="package")
def crews(tmp_path_factory: pytest.TempPathFactory) -> Crews:
    crews = Crews(tmp_path_factory.mktemp("crews"))
    crews.finish("one", 1)
    return crews
