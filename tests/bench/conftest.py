"""What refuses a measurement."""

import pytest

from glm4v_patched.cli import main
from glm4v_patched.terminal_text import pip_install


@pytest.fixture
def refused(capsys, words):
    """A command ends before anything runs or is printed, and names what is wrong with it."""

    def check(command: list, *named: str) -> None:
        assert main([*map(str, command)]) == 1
        said = capsys.readouterr()
        # On a busy machine, what is being done is said before.
        told = f"\n{said.err.strip()}".partition("\nglm4v-patched: ")[2]
        for part in named:
            assert part in told, told
        assert said.out == ""
        words(told, pip=pip_install())

    return check
