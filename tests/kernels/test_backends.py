"""Which backend "auto" takes: the Triton kernels only on the GPUs that they are made for."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from minimax_kernels import backends


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
