"""What several files of tests share."""

from pathlib import Path

import pytest

from tests.helpers.processes import cpu_environment
from tests.helpers.typed import write_programs


@pytest.fixture(scope="session")
def programs(tmp_path_factory) -> Path:
    """A folder with ``python`` and ``torchrun`` for ``cpu_environment``, which run as forks."""
    folder = tmp_path_factory.mktemp("programs") / "bin"
    write_programs(folder, cpu_environment(), "all")
    return folder
