"""Bfloat16 in Triton's interpreter as on a GPU: values in products, rounding to nearest in casts.

The interpreter keeps bfloat16 as 16-bit patterns; it multiplies the patterns in `tl.dot` and truncates in a
cast from float32. Our kernels touch bfloat16 in these two places only (everything else is float32), so these
two are mended. `install()` must run before the first kernel does.
"""

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def install() -> None:
    """Mend the interpreter's builder, once."""
    if getattr(InterpreterBuilder, "rounds_bfloat16", False):
        return
    dot, cast, convert = (
        getattr(InterpreterBuilder, n) for n in ("create_dot", "cast_impl", "create_fp_to_fp")
    )

    def create_dot(self, a, b, *rest):
        return dot(self, _as_float32(a), _as_float32(b), *rest)

    def cast_impl(self, x, dtype):
        if dtype.scalar == tl.bfloat16:
            return x if x.dtype.scalar == tl.bfloat16 else TensorHandle(_round(x.data), tl.bfloat16)
        return cast(self, _as_float32(x), dtype)

    def create_fp_to_fp(self, x, dtype, rounding):
        if tl.bfloat16 in (x.dtype.scalar, dtype.scalar):
            return self.cast_impl(x, dtype)
        return convert(self, x, dtype, rounding)

    InterpreterBuilder.create_dot = create_dot
    InterpreterBuilder.cast_impl = cast_impl
    InterpreterBuilder.create_fp_to_fp = create_fp_to_fp
    InterpreterBuilder.rounds_bfloat16 = True


def _as_float32(x: TensorHandle) -> TensorHandle:
    if x.dtype.scalar != tl.bfloat16:
        return x
    return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _round(values: np.ndarray) -> np.ndarray:
    """Bit patterns of the nearest bfloat16, ties to even; NaN stays NaN."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    bits = values.view(np.uint32)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, nearest).astype(np.uint16)
