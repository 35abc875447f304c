"""Resume a run: what its checkpoint must hold, and which options may differ."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from catnat.cli.names import Options

# Options of the Trainer that set its length, observe, or choose the device.
_MAY_DIFFER = {
    *("max_steps", "max_epochs", "max_time", "min_steps", "min_epochs", "total_steps"),
    *("accelerator", "device", "devices", "num_nodes", "strategy", "default_root_dir"),
    *("callbacks", "logger", "profiler", "log_every_n_steps", "detect_anomaly"),
    *("limit_val_batches", "limit_test_batches", "limit_predict_batches", "num_sanity_val_steps"),
    *("val_check_interval", "check_val_every_n_epoch", "inference_mode"),
    *("enable_checkpointing", "enable_progress_bar", "enable_model_summary"),
    *("eval_games", "eval_every", "eval_deterministic"),
}
_OTHERS_MAY_DIFFER = {"ckpt_path", "import", "save_every", "data.root", "data.download"}
_REQUIRED = ("state_dict", "loops", "optimizer_states", "lr_schedulers", "global_step")
_EVALUATED = ("head", "head_options")  # hyperparameters that an evaluation cannot change


def may_differ(option: str) -> bool:
    """Whether a resumed run may change an option, given by its full name."""
    group, _, name = option.partition(".")
    observes = group in ("fisher", "checkpoint") or option in _OTHERS_MAY_DIFFER
    return observes or (group == "trainer" and name in _MAY_DIFFER)


def check_options(path: Path, before: Options, now: Options, changed: Collection[str]) -> None:
    """Raise an error if a resumed run has options that may not differ.

    Args:
        path: the checkpoint.
        before: options of the run that is resumed, by full name.
        now: options of the resumed run.
        changed: options that the command line sets.
    """
    for option in sorted(changed):
        if may_differ(option):
            continue
        values = [_values_of(option, options) for options in (before, now)]
        if values[0] != values[1]:
            raise ValueError(
                f"--{option} cannot change when {path} is resumed: {_shown(values[0], option)} -> "
                f"{_shown(values[1], option)}; only length, logging, validation, checkpoints, "
                "device and folders can"
            )


def check_checkpoint(path: Path, checkpoint: Options, options: Options, is_fit: bool) -> None:
    """Raise an error if a file is not a checkpoint of this model with these options.

    Args:
        path: the file.
        checkpoint: its content.
        options: options of the model, by name.
        is_fit: whether the run resumes, which needs more than the weights.
    """
    if "pytorch-lightning_version" not in checkpoint:
        raise ValueError(f"checkpoint {path} belongs to another model")
    required = _REQUIRED if is_fit else _REQUIRED[:1]
    if missing := [name for name in required if name not in checkpoint]:
        raise ValueError(f"checkpoint {path} has no {missing[0]}")
    step = checkpoint.get("global_step", 0)
    if not isinstance(step, int) or step < 0:
        raise ValueError(f"checkpoint {path} has the global_step {step!r}")
    hyper_parameters = checkpoint.get("hyper_parameters", {})
    for name in hyper_parameters.keys() & options.keys():
        saved, wanted = hyper_parameters[name], options[name]
        is_compared = name in _EVALUATED or (is_fit and wanted is not None)
        if is_compared and _plain(saved) != _plain(wanted):
            raise ValueError(f"checkpoint {path} is of {name} {saved!r}, not {wanted!r}")


def resumed_text(began: int, steps: int, steps_at_once: int = 1) -> str:
    """Return the line that a resumed run prints.

    Args:
        began: the step of the checkpoint.
        steps: the length of the run; negative for no limit.
        steps_at_once: steps of a rollout; a run may be longer than its length by less than that.
    """
    if 0 <= steps <= began - steps_at_once:
        raise ValueError(f"the checkpoint has {began} steps, --max_steps is {steps}")
    if 0 <= steps <= began:
        return f", which had finished after step {began}: only its test is done again"
    return f", resumed after step {began}"


def _values_of(option: str, options: Options) -> Options:
    """Return the value of an option and of its parts."""
    return {
        name: value
        for name, value in options.items()
        if (name == option or name.startswith(f"{option}.")) and value is not None
    }


def _shown(values: Options, option: str) -> str:
    return (
        ", ".join(
            f"{name.removeprefix(option).lstrip('.')} {value}".strip()
            for name, value in values.items()
        )
        or "none"
    )


def _plain(value: Any) -> Any:
    """A value as comparison needs it: without options counts as none."""
    return value or None if isinstance(value, dict) or value is None else value
