"""What tests of models ask."""

import pytest

from tests.helpers.answering import Files, write_files


@pytest.fixture(scope="session")
def files(tmp_path_factory) -> Files:
    return write_files(tmp_path_factory.mktemp("models"))
