"""Models that every test shares: they are opened once."""

from collections.abc import Iterator

import fornax
import pytest


@pytest.fixture(scope="session")
def model() -> Iterator[fornax.Model]:
    with fornax.open("smollm2", device="cpu", context=1024, parallel=4) as model:
        yield model


@pytest.fixture(scope="session")
def encoder() -> Iterator[fornax.Model]:
    with fornax.open("minilm", device="cpu") as model:
        yield model
