"""Compile every Triton kernel that ships, for an H100 or H200, without a GPU, and print what came of it.

    python scripts/compile_kernels.py                    the table
    python scripts/compile_kernels.py --check            fail on a spill, a slow product, too much memory
    python scripts/compile_kernels.py --widths 128 --types bfloat16

The operators' own host code runs on CPU tensors; each launch is compiled instead of run. So the table holds
the kernels with exactly the constants, warps and stages that a user gets.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, dataclass, fields
from multiprocessing import get_context

import torch
import triton
from triton.backends.compiler import GPUTarget

from minimax_hybrid.formatting import table
from minimax_kernels import BlockMemory
from minimax_kernels.lightning import triton_decode, triton_forward, triton_segments
from minimax_kernels.lightning.triton_backward import backward

TYPES = ("bfloat16", "float16", "float32")
WIDTHS = (16, 32, 64, 128, 256)  # 80, 96 and 192 run in the next larger tile
# One SM of compute capability 9.0: registers, bytes of shared memory, and the most that one program may have.
REGISTERS, SHARED, SHARED_PER_PROGRAM = 65536, 233472, 232448


@dataclass(frozen=True)
class Row:
    """One compiled kernel."""

    kernel: str
    call: str  # which call of the host code launched it
    type: str
    D: int
    warps: int
    registers: int
    spilled: int  # loads and stores of registers that did not fit
    shared: int  # bytes
    per_SM: int  # programs that fit on one SM
    wgmma: int
    hmma: int
    ffma: int
    tma: int  # loads and stores of tensor descriptors


class Offline:
    """Answers what the compiler asks the CUDA driver."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_all(dtype: str, D: int) -> list[Row]:
    """Every kernel that forward, backward and decode launch for one type and head width."""
    if triton.knobs.runtime.interpret:
        sys.exit("compile_kernels.py compiles; unset TRITON_INTERPRET")
    warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")
    triton.runtime.driver.set_active(Offline())
    compiled: dict[str, Row] = {}
    call = ""

    def record(kernel: triton.JITFunction, grid: tuple[int, ...], arguments: dict[str, object]) -> None:
        built = kernel.warmup(grid=grid, **arguments)
        row = measure(built, call, dtype, D)
        compiled.setdefault(built.hash, row)

    triton_forward.launch = triton_segments.launch = triton_decode.launch = record
    H, T = 2, 2 * triton_segments.SEGMENT_LENGTHS[0]
    x = torch.empty(1, T, H, D, dtype=getattr(torch, dtype))
    log_decay, state = torch.zeros(H), torch.empty(1, H, D, D)
    for packed in (None, torch.tensor([0, T], dtype=torch.int32)):
        for segment_length in (0, triton_segments.SEGMENT_LENGTHS[0]):
            for memory in (None, state):
                layout = "dense" if packed is None else "packed"
                name = f"{layout} {'segments' if segment_length else 'one pass'}"
                name += " from zero" * (memory is None)
                call = f"forward, {name}"
                _, _, starts = triton_forward.forward(
                    x, x, x, log_decay, memory, packed, segment_length=segment_length
                )
                call = f"backward, {name}"
                backward(x, x, x, log_decay, memory, starts, packed, x, memory, segment_length=segment_length)
    call = "decode"
    one = x[:, :1]
    triton_decode.decode_triton(one, one, one, log_decay, BlockMemory.empty(one, one))
    return list(compiled.values())


def measure(built: triton.compiler.CompiledKernel, call: str, dtype: str, D: int) -> Row:
    """Resources and instruction counts of one compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        usage, assembly = (_cuobjdump(flag, file.name) for flag in ("-res-usage", "-sass"))
    opcodes = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[0-9T]+\s+)?([A-Z][A-Z0-9_]*)", assembly)
    registers = int(re.search(r"REG:(\d+)", usage)[1])
    warps, shared = built.metadata.num_warps, built.metadata.shared
    granted = -(-registers // 8) * 8 * 32 * warps
    return Row(
        kernel=built.metadata.name,
        call=call,
        type=dtype,
        D=D,
        warps=warps,
        registers=registers,
        spilled=opcodes.count("LDL") + opcodes.count("STL"),
        shared=shared,
        per_SM=min(REGISTERS // granted, SHARED // (shared + 1024), 64 // warps),
        wgmma=opcodes.count("HGMMA"),
        hmma=opcodes.count("HMMA"),
        ffma=opcodes.count("FFMA"),
        tma=opcodes.count("UTMALDG") + opcodes.count("UTMASTG"),
    )


def _cuobjdump(flag: str, path: str) -> str:
    tool = triton.knobs.nvidia.cuobjdump.path
    return subprocess.run([tool, flag, path], capture_output=True, text=True, check=True).stdout


def complaints(rows: list[Row]) -> list[str]:
    """What `--check` refuses."""
    found = [] if rows else ["nothing was compiled"]
    for row in rows:
        name = f"{row.kernel} ({row.call}, {row.type}, D = {row.D})"
        if row.spilled:
            found.append(f"{name} spills registers: {row.spilled} loads and stores")
        if row.shared > SHARED_PER_PROGRAM:
            found.append(f"{name} needs {row.shared} bytes of shared memory, {SHARED_PER_PROGRAM} exist")
        product = row.kernel in ("sweep_kernel", "replay_kernel")
        if product and row.type != "float32" and row.D >= 64 and (row.hmma or row.ffma > 64 or not row.wgmma):
            found.append(f"{name} has products that are not wgmma: {row.hmma} hmma, {row.ffma} ffma")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--types", nargs="+", choices=TYPES, default=TYPES)
    parser.add_argument("--widths", nargs="+", type=int, default=WIDTHS)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    args = parser.parse_args()
    jobs = [(dtype, D) for D in sorted(args.widths, reverse=True) for dtype in args.types]
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        found = list(pool.map(compile_all, *zip(*jobs, strict=True)))
    rows = sorted(sum(found, []), key=lambda row: (row.type, row.D, row.kernel))
    print(f"Triton {triton.__version__}, compute capability 9.0, {len(rows)} kernels\n")
    print(table([field.name for field in fields(Row)], [list(map(str, astuple(row))) for row in rows]))
    wrong = complaints(rows)
    if args.check:
        print("\n" + ("\n".join(wrong) or "check: no spills, all 16-bit products wgmma, shared memory fits"))
        sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
