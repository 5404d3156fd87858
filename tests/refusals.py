"""What a config is refused with."""

from pathlib import Path
from typing import Any

import pytest

from gaugelasso.errors import UserError
from tests.tiny import tiny


def refusal(folder: Path, **changes: Any) -> str:
    """The error message for these changes."""
    with pytest.raises(UserError) as error:
        tiny(folder, **changes)
    return str(error.value)
