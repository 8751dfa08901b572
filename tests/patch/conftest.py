"""Fixtures of this folder: a model of the stand-in for the published code."""

import copy

import pytest
import torch

from tests.helpers.legacy_repository import legacy_model


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    with legacy_model(tmp_path_factory.mktemp("legacy"), dtype=torch.float32) as model:
        yield model


@pytest.fixture
def legacy(loaded):
    """A copy of that model in eval mode, fp32."""
    return copy.deepcopy(loaded).eval()
