"""Sweeps: plans of many runs, engines that do them, tables and figures of what they found."""

import sys
from importlib import import_module


def run_command(command: str, words: list[str]) -> int:
    """Do what ``catnat <command> <words>`` says, and return the exit code; mistakes are 2."""
    package = "catnat.cli" if command == "compare" else "catnat.sweeps"
    try:
        code: int = import_module(f"{package}.{command}").main(words)
    except ModuleNotFoundError as error:
        message = f'{error.name} is missing: pip install "catnat[sweep]"'
    except (OSError, ValueError) as error:
        message = " ".join(str(error).split())  # in one line
    else:
        return code
    print(f"catnat {command}: {message}", file=sys.stderr)
    return 2
