"""What is measured, as data. `models.py` and `operators.py` build the work that a side does for a task.

A case has sides, which take turns in one process, and tasks, each timed for every side. Its tests run first;
a case whose tests fail is not timed.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from .measure import Work
from .models import model_work, native_work, twin_work
from .operators import log_probs_work, operator_work


@dataclass(frozen=True)
class Task:
    """One thing to time. For "decode", `length` is the context that a token attends to."""

    kind: str
    length: int
    batch: int = 1
    dtype: str = "float32"
    rounds: int = 5
    memory: bool = False
    without: tuple[str, ...] = ()  # sides that do not take part


@dataclass(frozen=True)
class Case:
    name: str
    about: str
    sides: tuple[str, ...]
    tests: tuple[str, ...]  # arguments of pytest: what must pass first
    tasks: tuple[Task, ...]
    quick: tuple[Task, ...]
    prepare: Callable[[str, Task], Work]

    def taking_part(self, task: Task) -> tuple[str, ...]:
        """The sides that this machine can run for a task; Triton's kernels need a GPU."""
        absent = task.without if torch.cuda.is_available() else (*task.without, "triton")
        return tuple(side for side in self.sides if side not in absent)


def _native_tasks() -> tuple[Task, ...]:
    tasks = []
    for dtype in ("float32", "bfloat16"):
        tasks += [Task("prefill", T, dtype=dtype, memory=True) for T in (1024, 4096, 16384)]
        tasks += [
            Task("decode", T, batch, dtype, rounds=40, memory=(T, batch) == (16384, 8))
            for T in (1024, 16384)
            for batch in (1, 8)
        ]
        tasks.append(Task("train", 2048, 2, dtype, memory=True))
    return tuple(tasks)


def _twin_tasks() -> tuple[Task, ...]:
    lengths = [1024 * 2**n for n in range(7)]  # 1K to 64K
    tasks = [Task("prefill", T, rounds=7, memory=T in (1024, 4096, 16384, 65536)) for T in lengths]
    return tuple(tasks + [Task("decode", T, rounds=40, memory=False) for T in lengths])


_OPERATORS = tuple(
    Task(kind, T, rounds=7, without=("reference",) if T > 1024 else ())
    for kind in ("forward", "forward+backward")
    for T in (256, 1024, 4096, 16384)
)
_OPERATOR_TESTS = ("tests/kernels/test_lightning.py",)
if not torch.cuda.is_available():  # Triton's kernels are not timed here, and its interpreter is slow
    _OPERATOR_TESTS += ("-k", "chunked")
_SMALL = "8 layers of width 128, 2 heads of 64, 8 experts (2 chosen) of 256, vocabulary 8,192"

CASES = {
    case.name: case
    for case in (
        Case(
            "native",
            "this model against transformers' own MiniMax class with the same weights: 8 layers of width "
            "512, 8 heads of 64, 2 key/value heads, 8 experts (2 chosen) of 1,024, vocabulary 8,192, whole "
            "heads rotated",
            ("ours", "transformers"),
            ("tests/test_benchmarks.py", "-k", "both_sides_of_the_native_case"),
            _native_tasks(),
            (Task("prefill", 1024, rounds=2), Task("decode", 1024, rounds=5)),
            native_work,
        ),
        Case(
            "twin",
            f"the hybrid against its softmax twin, every layer softmax through SDPA: {_SMALL}",
            ("hybrid", "softmax"),
            ("tests/test_benchmarks.py::test_the_twins_decode_as_they_prefill",),
            _twin_tasks(),
            tuple(Task(kind, T, rounds=3) for kind in ("prefill", "decode") for T in (1024, 4096)),
            twin_work,
        ),
        Case(
            "operators",
            "lightning attention against causal softmax attention (SDPA), 8 heads of 64",
            ("triton", "chunked", "reference", "softmax"),
            _OPERATOR_TESTS,
            _OPERATORS,
            (Task("forward", 1024, rounds=3), Task("forward+backward", 1024, rounds=3)),
            operator_work,
        ),
        Case(
            "log_probs",
            "log-probabilities of given tokens and their gradients, in chunks against log_softmax of the "
            "full logits: width 512, vocabulary 200,064",
            ("chunked", "plain"),
            ("tests/kernels/test_log_probs.py",),
            tuple(Task("log-probs", N, dtype="bfloat16", rounds=5, memory=True) for N in (256, 1024, 4096)),
            (Task("log-probs", 64, dtype="bfloat16", rounds=3),),
            log_probs_work,
        ),
        Case(
            "train",
            f"one training step of the hybrid and of its softmax twin: {_SMALL}",
            ("hybrid", "softmax"),
            (
                "tests/kernels/test_lightning_gradcheck.py",
                "tests/test_benchmarks.py",
                "-k",
                "gradcheck and chunked or the_twins",
            ),
            tuple(Task("train", T, 1, rounds=5, memory=True) for T in (1024, 4096, 16384)),
            (Task("train", 1024, 1, rounds=2),),
            model_work,
        ),
    )
}


def quick(task: Task) -> Task:
    """The same task without a look at memory."""
    return replace(task, memory=False)
