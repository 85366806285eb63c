"""Which backend "auto" takes, and which settings of PyTorch reach what is computed in float32."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from minimax_kernels import backends, fp32_linear, token_log_probs


@pytest.mark.parametrize(
    ("capability", "dtype", "chosen"),
    [
        ((9, 0), torch.bfloat16, "triton"),
        ((9, 0), torch.float64, "chunked"),
        ((8, 0), torch.bfloat16, "chunked"),
        ((12, 0), torch.float32, "chunked"),
    ],
)
def test_auto_takes_triton_on_the_gpus_it_is_made_for(
    capability: tuple[int, int], dtype: torch.dtype, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(backends, "_HAS_TRITON", True)
    with FakeTensorMode():
        x = torch.empty(1, device="cuda", dtype=dtype)
    assert backends.choose("auto", x) == chosen


def test_auto_takes_plain_pytorch_on_a_cpu() -> None:
    assert backends.choose("auto", torch.empty(1)) == "chunked"


@pytest.mark.parametrize("name", ["cuda", "Triton"])
def test_a_backend_that_does_not_exist_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is unknown; choose 'auto' or one of"):
        backends.choose(name, torch.empty(1))


class Precisions(TorchDispatchMode):
    """The setting of float32 products under which each product runs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(word in func.__name__ for word in ("mm", "linear")):
            self.seen.add(torch.backends.mkldnn.matmul.fp32_precision)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("operator", [fp32_linear, token_log_probs])
def test_no_setting_of_tf32_reaches_the_fp32_head(operator: Callable[..., Tensor]) -> None:
    hidden, weight = torch.randn(4, 8, requires_grad=True), torch.randn(16, 8, requires_grad=True)
    inputs = (hidden, weight, torch.tensor([1, 2, 3, 4]))[: 2 if operator is fp32_linear else 3]
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        setting = torch.backends.mkldnn.matmul.fp32_precision
        with Precisions() as precisions:
            operator(*inputs).sum().backward()
        assert precisions.seen == {"ieee"} and setting != "ieee"
        assert torch.backends.mkldnn.matmul.fp32_precision == setting
    finally:
        torch.set_float32_matmul_precision(before)
