"""Registers MinAtar's games with Gymnasium: --import minatar_games --env MinAtar/Breakout-v0.

They need ``pip install minatar``. The games of version 0 have all six actions.
"""

import logging

logging.disable(logging.WARNING)  # Gymnasium warns of every game
from minatar.gym import register_envs  # noqa: E402

logging.disable(logging.NOTSET)
register_envs()
