"""Run a function of a test module on several gloo ranks, each a process of its own, all started by torchrun.

`run_on_ranks(function, "argument")` calls `function("argument")` on every rank, with the process group ready.
A rank that raises ends the others, and so does the time limit; nothing outlives the test.
"""

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

TESTS = Path(__file__).parents[1]


def run_on_ranks(function: Callable[..., None], *arguments: str, ranks: int = 2, seconds: int = 150) -> str:
    """What the ranks printed.

    Raises:
        AssertionError: a rank failed, with what they printed; or the time ran out.
    """
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)),
        *(str(Path(__file__)), function.__module__, function.__name__, *arguments),
    ]
    paths = [TESTS, TESTS / "parallel", TESTS.parent, TESTS.parent / "kernels"]
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",  # gloo on the CPU wherever the tests run
    }
    process = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        printed, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"{ranks} ranks took more than {seconds} seconds") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 0, printed[-60000:]
    return printed


def main(module: str, function: str, *arguments: str) -> None:
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    getattr(importlib.import_module(module), function)(*arguments)
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
