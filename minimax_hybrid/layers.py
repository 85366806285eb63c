"""The small parts of a layer: projection, RMSNorm, partial rotary embedding, weighted residual."""

import torch
from torch import Tensor, nn

from minimax_kernels import linear, rms_norm


class BiasFreeLinear(nn.Linear):
    """A projection without bias, by the fastest float32 product a CPU has; elsewhere PyTorch's own."""

    def __init__(self, width_in: int, width_out: int):
        super().__init__(width_in, width_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) in float32, cast to x's type, then times the weight."""

    def __init__(self, width: int, *, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, eps=self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class RotaryEmbedding(nn.Module):
    """Angles of the rotary embedding for the first `rotary_dim` dimensions of a head.

    The exponent counts in `rotary_dim`, not in the head's width: rotating the whole head is another model.
    """

    def __init__(self, rotary_dim: int, theta: float):
        super().__init__()
        self.rotary_dim, self.theta = rotary_dim, theta

    def forward(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine (B, 1, T, rotary_dim), float32, of positions (B, T)."""
        exponent = torch.arange(0, self.rotary_dim, 2, device=position_ids.device).float() / max(
            self.rotary_dim, 1
        )
        angle = position_ids[:, None, :, None].float() / self.theta**exponent
        angle = torch.cat((angle, angle), dim=-1)
        return angle.cos(), angle.sin()


def apply_rotary_emb(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the leading dimensions of x (B, H, T, D) by halves, in float32; the rest passes through."""
    width = cos.shape[-1]
    x_rot, x_pass = x[..., :width].to(torch.promote_types(x.dtype, cos.dtype)), x[..., width:]
    first, second = x_rot.chunk(2, dim=-1)
    rotated = x_rot * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((rotated.to(x.dtype), x_pass), dim=-1)


def weighted_residual(residual: Tensor, branch: Tensor, *, alpha: float, beta: float) -> Tensor:
    """alpha * residual + beta * branch: DeepNorm's connection, alpha = (2 L)^(1/4) in the releases."""
    return torch.add(branch if beta == 1 else branch * beta, residual, alpha=alpha)
