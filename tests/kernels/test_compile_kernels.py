"""What `scripts/compile_kernels.py --check` refuses; the compiling itself is the script's, and CI runs it."""

import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

if not find_spec("triton"):
    pytest.skip("triton is not installed", allow_module_level=True)

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

from compile_kernels import Row, complaints  # noqa: E402

GOOD = Row(
    kernel="sweep_kernel", call="forward, dense one pass", type="bfloat16", D=128, warps=4, registers=242,
    spilled=0, shared=114728, per_SM=2, wgmma=36, hmma=0, ffma=0, tma=9,
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"spilled": 10}, "spills registers: 10"),
        ({"shared": 232449}, "needs 232449 bytes"),
        ({"hmma": 16}, "not wgmma: 16 hmma"),
        ({"wgmma": 0, "ffma": 9216, "kernel": "replay_kernel"}, "not wgmma: 0 hmma, 9216 ffma"),
    ],
)
def test_a_bad_kernel_is_named_with_its_fault_and_a_good_one_is_not(change: dict, complaint: str) -> None:
    (found,) = complaints([GOOD, replace(GOOD, **change)])
    assert complaint in found and "bfloat16, D = 128" in found


def test_narrow_heads_float32_and_kernels_without_products_may_do_without_wgmma() -> None:
    for change in ({"D": 32, "hmma": 16}, {"type": "float32", "ffma": 800}, {"kernel": "scan_kernel"}):
        assert complaints([replace(GOOD, wgmma=0, **change)]) == []


def test_an_empty_report_is_refused() -> None:
    assert complaints([]) == ["nothing was compiled"]
