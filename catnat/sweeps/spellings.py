"""Optimizers and schedules as plans and rows spell them, for example ``lr_decay: 0.9``."""

from typing import Any

from catnat.checks import require_choice

_OPTIMIZERS = {"adam": "torch.optim.Adam", "sgd": "torch.optim.SGD"}
_SCHEDULERS = "torch.optim.lr_scheduler"


def command_options(options: dict[str, Any], default_steps: int = 5000) -> dict[str, Any]:
    """The options of a plan as the command line spells them.

    Args:
        options: the options of a run, by name.
        default_steps: number of steps of a linear schedule where there is no ``max_steps``.

    >>> command_options({"optimizer": "sgd", "lr_decay": 1.0})
    {'optimizer': 'torch.optim.SGD'}
    >>> list(command_options({"lr_schedule": "linear", "max_steps": 9}).values())
    [9, 'torch.optim.lr_scheduler.PolynomialLR', 9]
    """
    spelled = dict(options)
    schedule = spelled.pop("lr_schedule", "constant")
    require_choice(("constant", "linear"), lr_schedule=schedule)
    decay, decay_steps = spelled.pop("lr_decay", 1.0), spelled.pop("lr_decay_steps", 1000)
    if "optimizer" in spelled:
        spelled["optimizer"] = _OPTIMIZERS.get(spelled["optimizer"], spelled["optimizer"])
    if schedule == "linear":
        spelled["lr_scheduler"] = f"{_SCHEDULERS}.PolynomialLR"
        spelled["lr_scheduler.total_iters"] = spelled.get("max_steps", default_steps)
    if float(decay) != 1:
        spelled["lr_scheduler"] = f"{_SCHEDULERS}.StepLR"
        spelled["lr_scheduler.gamma"] = decay
        spelled["lr_scheduler.step_size"] = decay_steps
    return spelled
