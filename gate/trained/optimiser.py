"""Muon for the weight matrices, AdamW for the rest; both on float32 copies of the bfloat16 weights.

Matrices of one shape are orthogonalised as one batch, so a step costs few kernel launches however many layers there
are. Muon forms the look-ups these tasks need in markedly fewer steps than AdamW on matrices of this size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def orthogonalise(x: Tensor, rounds: int = 5) -> Tensor:
    """Nearly the closest (semi-)orthogonal matrices to x [n, rows, columns], by Newton-Schulz iteration."""
    wide = x.shape[-2] <= x.shape[-1]
    x = (x if wide else x.mT).bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(rounds):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return (x if wide else x.mT).float()


class Optimiser:
    """``step(scale)`` applies the gradients of ``model`` with both learning rates times ``scale`` and clears them."""

    def __init__(self, model: nn.Module, lr_matrix: float, lr_other: float, decay: float = 0.01) -> None:
        self.lr_matrix, self.lr_other, self.decay = lr_matrix, lr_other, decay
        groups: dict[tuple[int, ...], list[nn.Parameter]] = {}
        self.others: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "embed_tokens" not in name and min(parameter.shape) >= 16:
                groups.setdefault(tuple(parameter.shape), []).append(parameter)
            else:
                self.others.append(parameter)
        self.groups = list(groups.values())
        self.masters = [torch.stack([p.detach().float() for p in group]) for group in self.groups]
        self.moments = [torch.zeros_like(m) for m in self.masters]
        self.other_masters = [p.detach().float().clone() for p in self.others]
        self.adam = torch.optim.AdamW(
            self.other_masters, lr=lr_other, betas=(0.9, 0.98), eps=1e-9, weight_decay=0.0, fused=True
        )

    @torch.no_grad()
    def step(self, scale: float) -> None:
        lr = self.lr_matrix * scale
        for group, master, moment in zip(self.groups, self.masters, self.moments):
            grad = torch.stack([p.grad for p in group]).float()
            moment.lerp_(grad, 0.05)
            update = orthogonalise(grad.lerp(moment, 0.95))
            rows, columns = master.shape[-2:]
            master.mul_(1.0 - lr * self.decay).add_(update, alpha=-lr * max(1.0, rows / columns) ** 0.5)
            torch._foreach_copy_(group, list(master.unbind(0)))
        for group in self.adam.param_groups:
            group["lr"] = self.lr_other * scale
        for master, parameter in zip(self.other_masters, self.others):
            master.grad = parameter.grad.float()
        self.adam.step()
        torch._foreach_copy_(self.others, self.other_masters)
        for parameters in (*self.groups, self.others):
            for parameter in parameters:
                parameter.grad = None

    def state(self, model: nn.Module) -> dict[str, Tensor]:
        """The model's state in float32, from the copies rather than from the rounded weights."""
        exact: dict[int, Tensor] = {}
        for group, master in zip(self.groups, self.masters):
            exact.update({id(p): m for p, m in zip(group, master.unbind(0))})
        exact.update({id(p): m for p, m in zip(self.others, self.other_masters)})
        named = dict(model.named_parameters())
        return {name: exact[id(named[name])].clone() if name in named else t.float() for name, t in model.state_dict().items()}
