"""The programs that wait for a GPU: small, in the interpreter, they find no fault and time every task."""

import subprocess
from pathlib import Path

import pytest
import torch

from minimax_kernels.backends import available, has_triton

if not has_triton():
    pytest.skip("triton is not installed", allow_module_level=True)

from benchmarks import gpu_check, gpu_lightning

ROOT = Path(__file__).parent.parent
needs_triton = pytest.mark.skipif("triton" not in available(), reason="needs a GPU or Triton's interpreter")


@needs_triton
def test_the_checks_pass_at_small_size(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--small"]) == 0
    passed, total = capsys.readouterr().out.split()[::2][:2]
    assert passed == total and int(total) > 30


@needs_triton
def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    honest = gpu_check.forward

    def wrong(*args: object, **options: object) -> tuple:
        out, last, starts = honest(*args, **options)
        return out, last * 1.1, starts

    monkeypatch.setattr(gpu_check, "forward", wrong)
    assert gpu_check.main(["--small"]) == 1
    assert "WRONG last: bfloat16, D = 16, dense, one pass" in capsys.readouterr().out


@needs_triton
def test_every_kind_of_task_is_timed_for_ours(capsys: pytest.CaptureFixture[str]) -> None:
    before = set(gpu_lightning.RESULTS.glob("*.csv"))
    assert gpu_lightning.main(["--small"]) == 0
    printed = capsys.readouterr().out
    for kind in ("forward ", "forward+backward", "packed forward+backward", "decode"):
        assert f"triton   {kind}" in printed
    assert set(gpu_lightning.RESULTS.glob("*.csv")) == before


def test_bytes_of_a_task_are_those_of_its_tensors() -> None:
    forward = gpu_lightning.Task("forward", H=64, T=1024)
    assert forward.least_bytes == 4 * 1024 * 64 * 128 * 2  # q, k, v, out: 1,024 bytes a token and head
    assert gpu_lightning.Task("packed forward", H=64, T=1024, B=8).least_bytes == forward.least_bytes


@pytest.mark.skipif(torch.cuda.is_available(), reason="tells what happens without a GPU")
def test_without_a_gpu_the_script_says_so_and_fails() -> None:
    done = subprocess.run(["bash", "scripts/check_gpu.sh"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "nothing was checked or timed" in done.stderr
    assert gpu_check.main([]) == 2 and gpu_lightning.main([]) == 2
