"""The programs that wait for a GPU: small, in the interpreter, they find no fault and time every task."""

import subprocess
from pathlib import Path

import pytest
import torch

from minimax_kernels.backends import available, has_triton

if not has_triton():
    pytest.skip("triton is not installed", allow_module_level=True)

from benchmarks import run
from benchmarks.cases import gpu, gpu_checks
from benchmarks.harness.rows import RESULTS

ROOT = Path(__file__).parents[2]
needs_triton = pytest.mark.skipif("triton" not in available(), reason="needs a GPU or Triton's interpreter")


@pytest.mark.slow
@needs_triton
def test_the_checks_pass_and_every_kind_of_task_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_text() for path in RESULTS.glob("*.csv")}
    assert run.main(["--case", "gpu", "--quick"]) == 0
    printed = capsys.readouterr().out
    passed, total = printed.split(" checks passed")[0].split()[-3::2]
    assert passed == total and int(total) > 30
    for kind in ("forward ", "forward+backward", "packed forward+backward", "decode"):
        assert f"triton   {kind}" in printed
    assert {path: path.read_text() for path in RESULTS.glob("*.csv")} == before


@pytest.mark.slow
@needs_triton
def test_a_wrong_kernel_is_found_and_not_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = gpu_checks.forward

    def wrong(*args: object, **options: object) -> tuple:
        out, last, starts = honest(*args, **options)
        return out, last * 1.1, starts

    monkeypatch.setattr(gpu_checks, "forward", wrong)
    monkeypatch.setattr(gpu, "measure", None)
    assert run.main(["--case", "gpu", "--quick"]) == 1
    assert "WRONG last: bfloat16, D = 16, dense, one pass" in capsys.readouterr().out


def test_a_timing_that_fails_is_reported_and_gives_no_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "measure", lambda task, side: 1 / 0)
    assert gpu.measured_or_reported(gpu.Shape("decode", 2, 1), "triton") == []
    assert "ZeroDivisionError" in capsys.readouterr().out


def test_bytes_of_a_task_are_those_of_its_tensors() -> None:
    forward = gpu.Shape("forward", H=64, T=1024)
    assert forward.least_bytes == 4 * 1024 * 64 * 128 * 2  # q, k, v, out: 1,024 bytes a token and head
    assert gpu.Shape("packed forward", H=64, T=1024, B=8).least_bytes == forward.least_bytes


@pytest.mark.skipif(torch.cuda.is_available(), reason="tells what happens without a GPU")
def test_without_a_gpu_the_script_says_so_and_fails() -> None:
    done = subprocess.run(["bash", "scripts/check_gpu.sh"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "nothing was checked or timed" in done.stderr
    assert run.main(["--case", "gpu"]) == 2
