"""RowAdam, a variant of Adam for layers in which a step uses few rows, such as output layers.

>>> from catnat import TreeLinear
>>> from catnat.optim import RowAdam
>>> layer = TreeLinear(16, 1000, frequent=100)
>>> optimizer = RowAdam(layer.parameters(), lr=1e-3)
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from catnat.checks import require_positive, require_within
from catnat.kernels.dispatch import HAS_TRITON, fit_triton


class RowAdam(torch.optim.Optimizer):
    r"""Adam that updates only the rows with a gradient, and their moments.

    It uses the rule of ``torch.optim.SparseAdam``: the moments of a row decay only in steps in
    which the row has a gradient. For the gradient g of a row in step t,

    .. math::
        m \leftarrow \beta_1 m + (1 - \beta_1) g, \quad v \leftarrow \beta_2 v + (1 - \beta_2) g^2,
        \quad w \leftarrow w - \alpha \frac{\sqrt{1 - \beta_2^t}}{1 - \beta_1^t}
        \frac{m}{\sqrt{v} + \epsilon}

    Unlike ``SparseAdam``, it also supports dense gradients. A row of zeros then counts as a row
    without a gradient. On CUDA, :class:`catnat.TreeLinear` computes such rows for nodes that no
    target passes, and one kernel finds and updates the remaining rows. If every row has a gradient,
    this optimizer is Adam with epsilon inside the bias correction.

    The rows of a parameter are the entries of its first dimension; each entry of a bias is a row.
    Sparse gradients must have sparse rows, like the gradients of ``nn.Embedding(sparse=True)`` and
    ``TreeLinear(sparse=True)``. There is no weight decay, because it would change every row.

    Args:
        params: parameters or parameter groups.
        lr: learning rate.
        betas: decay rates of the two moments, in [0, 1).
        eps: term added to the square root of the second moment.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        require_positive(lr=lr, eps=eps)
        require_within(0, 1, "[)", beta1=betas[0], beta2=betas[1])
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters; an option of Adam that RowAdam has not is a ValueError."""
        for name in ("weight_decay", "amsgrad", "maximize"):
            if param_group.get(name):
                raise ValueError(f"RowAdam has no {name}, got {param_group[name]!r}")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Update the rows that have a gradient.

        Args:
            closure: function that computes the loss and its gradients again.

        Returns:
            The loss of the closure; None without a closure.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad, group)
        return loss

    def _update(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        state["step"] = int(state["step"]) + 1
        beta1, beta2 = group["betas"]
        correction1 = 1 - beta1 ** state["step"]
        correction2 = 1 - beta2 ** state["step"]
        size = float(group["lr"]) * math.sqrt(correction2) / correction1
        moments = state["exp_avg"], state["exp_avg_sq"]
        rows = None
        if grad.layout == torch.sparse_coo:
            if grad.sparse_dim() != 1:
                shown = f"{grad.sparse_dim()} sparse dimensions"
                raise ValueError(f"RowAdam takes gradients with sparse rows, got one with {shown}")
            grad = grad.coalesce()
            rows, grad = grad._indices()[0], grad._values()
        numbers = size, beta1, beta2, group["eps"]
        has_rows = param.dim() > 0 and param.numel() > 0
        if HAS_TRITON and param.is_cuda and has_rows and fit_triton(param, grad, *moments):
            from catnat.kernels.triton_rows import update_rows

            update_rows(param, grad, rows, *moments, *numbers)
            return
        if rows is None:
            grad = grad if grad.dim() else grad[None]
            largest = grad.flatten(1).abs().amax(1) if grad.dim() > 1 else grad
            rows = (largest != 0).nonzero()[:, 0]  # NaN is not 0
            grad = grad[rows]
        if len(rows):
            update_rows_plainly(param, grad, rows, *moments, *numbers)


def update_rows_plainly(
    param: Tensor,
    grad: Tensor,
    rows: Tensor,
    mean: Tensor,
    square: Tensor,
    size: float,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """Update rows of a parameter and its moments in place, in plain torch.

    Args:
        param: parameter, (S, *).
        grad: gradients of the rows, (n, *).
        rows: indices of the rows, without repetitions, (n,) int64.
        mean: first moment, (S, *).
        square: second moment, (S, *).
        size: learning rate times the bias corrections of both moments.
        beta1: decay rate of the first moment.
        beta2: decay rate of the second moment.
        eps: term added to the square root of the second moment.
    """
    param, mean, square = (x if x.dim() else x[None] for x in (param, mean, square))
    old_mean = mean[rows]
    old_square = square[rows]
    # This order of operations gives the results of torch.optim.SparseAdam bit for bit.
    new_mean = grad.sub(old_mean).mul_(1 - beta1).add_(old_mean)
    new_square = grad.pow(2).sub_(old_square).mul_(1 - beta2).add_(old_square)
    mean.index_copy_(0, rows, new_mean)
    square.index_copy_(0, rows, new_square)
    param.index_add_(0, rows, -size * new_mean.div_(new_square.sqrt_().add_(eps)))
