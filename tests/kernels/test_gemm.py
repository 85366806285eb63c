"""Dense products: the library follows from the CPU's maker and the size, and changes nothing but rounding."""

import pytest
import torch
from torch import Tensor

from minimax_kernels import gemm

LARGE = (64, 512, 1024)  # tokens, width in, width out


def product(*, onednn: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, ...]:
    """The product of large matrices and its gradients."""
    monkeypatch.setattr(gemm, "_onednn_is_faster", lambda: onednn)
    rng = torch.Generator().manual_seed(0)
    R, K, N = LARGE
    x = torch.randn(R, K, generator=rng).requires_grad_()
    weight = torch.randn(N, K, generator=rng).requires_grad_()
    out = gemm.linear(x, weight)
    return (out, *torch.autograd.grad(out, (x, weight), torch.ones_like(out)))


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch was built without oneDNN")
def test_both_libraries_give_the_same_product_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = product(onednn=True, monkeypatch=monkeypatch)
    assert "_LinearBackward" in str(ours[0].grad_fn.next_functions)
    plain = product(onednn=False, monkeypatch=monkeypatch)
    assert "_LinearBackward" not in str([plain[0].grad_fn, plain[0].grad_fn.next_functions])
    for found, wanted in zip(ours, plain, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize(
    ("description", "intel"),
    [
        ("processor : 0\nvendor_id\t: GenuineIntel\nflags : amx_tile", True),
        ("Intel64 Family 6 Model 143 Stepping 8, GenuineIntel", True),
        ("processor : 0\nvendor_id\t: AuthenticAMD", False),
        ("CPU implementer : 0x41", False),
        ("", False),
    ],
)
def test_only_an_intel_cpu_stays_with_mkl(
    description: str, intel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gemm, "cpu_description", lambda: description)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    gemm._onednn_is_faster.cache_clear()
    try:
        has_onednn = hasattr(torch.ops.mkldnn, "_linear_pointwise")
        assert gemm._onednn_is_faster() == (has_onednn and not intel)
    finally:
        gemm._onednn_is_faster.cache_clear()


def test_a_machine_without_proc_is_described_by_python(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*args: object, **options: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(gemm.Path, "read_text", absent)
    assert gemm.cpu_description() == gemm.platform.processor()
