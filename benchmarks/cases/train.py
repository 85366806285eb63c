"""A training step of the hybrid beside one of its softmax twin."""

from ..harness.measure import Task
from .twin import SIDES, prepare

__all__ = ["ABOUT", "QUICK", "SIDES", "TASKS", "TESTS", "prepare"]

ABOUT = (
    "one training step of the hybrid and of its softmax twin: 8 layers of width 128, 2 heads of 64, 8 "
    "experts (2 chosen) of 256, vocabulary 8,192"
)
TESTS = (
    "tests/kernels/test_lightning_gradcheck.py",
    "tests/benchmarks/test_models.py",
    "-k",
    "gradcheck and chunked or twins",
)
TASKS = tuple(Task("train", T, rounds=5, memory=True) for T in (1024, 4096, 16384))
QUICK = (Task("train", 1024, rounds=2),)
