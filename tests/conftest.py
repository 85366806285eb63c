"""Fixtures shared by all tests: device, backend, NaN-filled memory for kernels, hypothesis profiles.

Without a GPU the Triton kernels run in Triton's interpreter. It must be chosen before triton is first
imported, hence the order of this file.
"""

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

if find_spec("triton") and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    from interpreter_bf16 import install

    install()

from minimax_kernels.backends import NAMES, available  # noqa: E402

torch.set_num_threads(1)

_QUIET = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}
settings.register_profile("quick", max_examples=12, **_QUIET)
settings.register_profile("thorough", max_examples=300, **{**_QUIET, "derandomize": False})
settings.load_profile("quick")  # pytest --hypothesis-profile thorough chooses the other


@pytest.fixture
def device() -> str:
    """Where tensors of a test live: the GPU if there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a GPU")


# Triton's interpreter takes most of the time of the kernels' tests, so the fast lane leaves it out;
# `kernels/test_triton.py` has a small case of each kernel in both lanes.
@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.slow] * (name == "triton")) for name in NAMES])
def backend(request: pytest.FixtureRequest) -> str:
    """Every backend in turn; one that cannot run here skips its tests."""
    if request.param not in available():
        pytest.skip(f"backend {request.param} cannot run on this machine")
    return request.param


@pytest.fixture(autouse=True)
def fresh_memory_is_nan(request: pytest.FixtureRequest) -> Iterator[None]:
    """Under tests/kernels torch.empty and its kin give NaN, so an element that nobody writes is seen."""
    if "kernels" not in Path(request.fspath).parts[-2:]:
        yield
        return
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
