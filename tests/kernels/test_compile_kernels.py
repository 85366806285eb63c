"""What `scripts/compile_kernels.py --check` refuses; the compiling itself is the script's, and CI runs it."""

from dataclasses import replace
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

if not find_spec("triton"):
    pytest.skip("triton is not installed", allow_module_level=True)

SCRIPT = Path(__file__).parents[2] / "scripts" / "compile_kernels.py"
SPEC = spec_from_file_location(SCRIPT.stem, SCRIPT)
script = module_from_spec(SPEC)
SPEC.loader.exec_module(script)

GOOD = script.Row(
    kernel="sweep_kernel",
    call="forward, dense one pass",
    type="bfloat16",
    D=128,
    warps=4,
    registers=242,
    spilled=0,
    shared=114728,
    per_SM=2,
    wgmma=36,
    hmma=0,
    ffma=0,
    tma=9,
)


def test_a_good_kernel_passes() -> None:
    assert script.complaints([GOOD]) == []


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"spilled": 10}, "spills registers: 10"),
        ({"shared": 232449}, "needs 232449 bytes"),
        ({"hmma": 16}, "not wgmma: 16 hmma"),
        ({"wgmma": 0}, "not wgmma"),
        ({"wgmma": 0, "ffma": 9216, "kernel": "replay_kernel"}, "not wgmma: 0 hmma, 9216 ffma"),
    ],
)
def test_a_bad_kernel_is_named_with_its_fault(change: dict, complaint: str) -> None:
    (found,) = script.complaints([GOOD, replace(GOOD, **change)])
    assert complaint in found and "bfloat16, D = 128" in found


def test_narrow_heads_float32_and_kernels_without_products_may_do_without_wgmma() -> None:
    rows = [
        replace(GOOD, D=32, wgmma=0, hmma=16),
        replace(GOOD, type="float32", wgmma=0, ffma=800),
        replace(GOOD, kernel="scan_kernel", wgmma=0),
    ]
    assert script.complaints(rows) == []


def test_an_empty_report_is_refused() -> None:
    assert script.complaints([]) == ["nothing was compiled"]


def test_the_table_has_a_line_for_every_kernel() -> None:
    lines = script.table([GOOD, GOOD]).splitlines()
    assert len(lines) == 4 and len({len(line) for line in lines}) == 1
    assert "242" in lines[-1]
