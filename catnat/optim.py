"""RowAdam: Adam for parameters of which a step uses few rows."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adam import adam
from torch.utils.weak import WeakIdKeyDictionary

from catnat.checks import require_choice, require_positive, require_within
from catnat.ops.adam_rows import adam_rows
from catnat.ops.known_rows import rows_of

_BEHIND: Any = WeakIdKeyDictionary()  # from a parameter to the RowAdam that owes its rows steps
_NEGLIGIBLE = 1e-10


@torch.compiler.disable  # type: ignore[untyped-decorator]
def bring_up_to_date(param: Tensor | None, rows: Tensor | None = None) -> None:
    """Before rows are read: take the steps that a :class:`RowAdam` owes them; None for all rows.

    :class:`catnat.TreeLinear` calls this function. A layer of your own calls it where it reads
    rows of a parameter that ``RowAdam(decay="dense")`` optimizes.
    """
    optimizer = _optimizer_behind(param)
    if optimizer is not None:
        optimizer.catch_up(param, rows)


def owes_steps(param: Tensor | None) -> bool:
    """Whether a :class:`RowAdam` may owe steps to rows of the parameter."""
    return _optimizer_behind(param) is not None


def _optimizer_behind(param: Tensor | None) -> RowAdam | None:
    owing = _BEHIND.get(param) if param is not None and _BEHIND else None
    return None if owing is None else owing()


class RowAdam(Optimizer):
    """Adam that touches the rows in use alone, for parameters with sparse gradients.

    Parameters with dense gradients are optimized as by ``torch.optim.Adam``, to the digit.

    Args:
        params: parameters, or groups of parameters, as for any optimizer.
        lr: the learning rate.
        betas: how slowly the mean of gradients and the mean of squared gradients forget.
        eps: added to the divisor.
        decay: what becomes of the moments of a row without gradient.
            ``"sparse"``: nothing, as in ``torch.optim.SparseAdam``.
            ``"dense"``: they decay and move the row, as ``torch.optim.Adam`` would with a gradient
            of 0. The row takes the steps that it is owed together, when it is used next:
            :class:`catnat.TreeLinear` asks for them before it reads a row. Other code that reads
            the parameter calls :meth:`catch_up` first. ``state_dict`` does.

    >>> layer = torch.nn.Embedding(1000, 8, sparse=True)
    >>> optimizer = RowAdam(layer.parameters(), lr=0.01)
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        decay: str = "sparse",
    ) -> None:
        require_positive(or_zero=True, lr=lr, eps=eps)
        require_within(0, 1, "[)", beta1=betas[0], beta2=betas[1])
        require_choice(("sparse", "dense"), decay=decay)
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step; returns the loss of the closure, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            used = [p for p in group["params"] if p.grad is not None]
            for param in used:
                self._prepare(param)
            for param in (p for p in used if p.grad.is_sparse):
                self._step_rows(param, group)
            if dense := [p for p in used if not p.grad.is_sparse]:
                self._step_dense(dense, group)
        return loss

    @torch.no_grad()
    def catch_up(self, param: Tensor | None = None, rows: Tensor | None = None) -> None:
        """Take the steps that rows without gradient are owed, with ``decay="dense"``.

        Args:
            param: which parameter; None for all.
            rows: indices of any shape; None for all rows.
        """
        for group in self.param_groups:
            for each in group["params"]:
                if (param is None or each is param) and "last" in self.state.get(each, {}):
                    self._catch_up(each, rows, group)

    def state_dict(self) -> dict[str, Any]:
        """The state, after all steps that are owed are taken."""
        self.catch_up()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, with the numbers of steps as integers."""
        super().load_state_dict(state_dict)
        for param, state in self.state.items():
            if "last" in state:
                # The dtype of the parameter may have rounded numbers; a saved state owes no steps.
                state["last"] = torch.where(state["last"] < 0, -1, int(state["step"]))
                _BEHIND[param] = weakref.ref(self)

    def _prepare(self, param: Tensor) -> None:
        state = self.state[param]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)

    def _step_dense(self, params: list[Tensor], group: dict[str, Any]) -> None:
        for param in params:
            if "last" in self.state[param]:
                self._catch_up(param, None, group)
                self.state[param]["rates"].append(float(group["lr"]))
                self.state[param]["last"] += 1
        states = [self.state[p] for p in params]
        adam(
            params,
            [p.grad for p in params if p.grad is not None],
            [s["exp_avg"] for s in states],
            [s["exp_avg_sq"] for s in states],
            [],
            [s["step"] for s in states],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=0.0,
            eps=group["eps"],
            maximize=False,
        )

    def _step_rows(self, param: Tensor, group: dict[str, Any]) -> None:
        assert param.grad is not None
        grad, state = param.grad, self.state[param]
        if grad.sparse_dim() != 1:
            raise ValueError(
                f"RowAdam takes gradients sparse in rows, got {grad.sparse_dim()} dims"
            )
        rows, values = rows_of(grad)
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        dense = group["decay"] == "dense"
        if dense:
            if "last" not in state:
                state["last"] = torch.full(param.shape[:1], -1, device=param.device)
                state["rates"] = [lr] * int(state["step"])
                _BEHIND[param] = weakref.ref(self)
            self._catch_up(param, rows, group)
        state["step"] += 1
        t = int(state["step"])
        root, step = math.sqrt(1 - beta2**t), lr / (1 - beta1**t)
        step, scale = (step, 1 / root) if dense else (step * root, 1.0)
        moments = state["exp_avg"], state["exp_avg_sq"]
        adam_rows(param, *moments, rows, values, (beta1, beta2), step, scale, group["eps"])
        if dense:
            state["rates"].append(lr)
            state["last"][rows] = t

    def _catch_up(self, param: Tensor, rows: Tensor | None, group: dict[str, Any]) -> None:
        """Take owed steps; in ``param.data``, because a graph may hold rows that do not change."""
        state, t = self.state[param], int(self.state[param]["step"])
        last = state["last"]
        if rows is None:
            rows = ((last >= 0) & (last < t)).nonzero()[:, 0]
        else:
            rows = rows.unique()
            rows = rows[(last[rows] >= 0) & (last[rows] < t)]  # -1: never used, nothing to decay
        if not len(rows):
            return
        since, which = last[rows].unique(return_inverse=True)
        table = _owed(since, t, state["rates"], group["betas"])[:, which].to(param.dtype)
        step, scale, keep1, keep2 = table.view(4, -1, *[1] * (param.dim() - 1))
        m, v = state["exp_avg"][rows], state["exp_avg_sq"][rows]
        param.data[rows] -= step * m / (v.sqrt() * scale + group["eps"])
        state["exp_avg"][rows], state["exp_avg_sq"][rows] = m * keep1, v * keep2
        last[rows] = t


def _owed(since: Tensor, t: int, rates: list[float], betas: tuple[float, float]) -> Tensor:
    """Steps since + 1..t of rows without gradient as one: step, scale and two decays, (4, U).

    Step s subtracts c_s m / (d_s sqrt(v) + eps). The sum of the steps is taken to be
    C m / (D sqrt(v) + eps) with C = sum_s c_s and D = C / sum_s (c_s / d_s), which is exact where
    eps or v is 0, and else wrong by less than eps. Steps are left out once they are negligible.
    """
    beta1, beta2 = betas
    first, most = int(since.min()), t - int(since.min())
    if 0 < beta1 < math.sqrt(beta2):
        most = min(most, math.ceil(math.log(_NEGLIGIBLE) / math.log(beta1 / math.sqrt(beta2))))
    known = torch.tensor(rates[first:], dtype=torch.float64, device=since.device)
    n = torch.arange(1, most + 1, dtype=torch.float64, device=since.device)
    s = since[:, None] + n  # (U, most)
    rate = torch.where(s <= t, known[(s.long() - first - 1).clamp_max(len(known) - 1)], 0.0)
    c = rate * beta1**n / (1 - beta1**s)
    d = torch.sqrt(beta2**n / (1 - beta2**s))
    total, roots = c.sum(1), (c / d).sum(1)
    gap = (t - since).double()
    return torch.stack((total, torch.where(roots > 0, total / roots, 1.0), beta1**gap, beta2**gap))
