"""What is told of a repository of the Hub."""

import pytest

from glm4v_patched.patch.repository import host_of


@pytest.mark.parametrize(
    "before", ["", "user@", "user:secret@", "user:se@cret@", "us@er:s@e@c:ret@", "a@b:%40@"]
)
@pytest.mark.parametrize("after", ["", "/", "/api/models", "/a@b/c", "/x?a=user@other.org"])
def test_of_an_address_only_its_host_is_told(before, after):
    assert host_of(f"https://{before}hub.local:8080{after}") == "https://hub.local:8080"
