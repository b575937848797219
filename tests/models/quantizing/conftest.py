"""Fixtures of both real models, pulled in place."""

from pathlib import Path

import pytest

from edgeinfer.models.pull import PullOptions, pull


@pytest.fixture
def smol(smollm2: Path) -> str:
    return pull(str(smollm2), options=PullOptions(name="smol", in_place=True)).name


@pytest.fixture
def gemma(gemma3: Path) -> str:
    return pull(str(gemma3), options=PullOptions(name="gemma", in_place=True)).name
