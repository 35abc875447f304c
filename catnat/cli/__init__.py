"""The command line behind train.py and the command catnat.

``options`` reads words and files once, before PyTorch is loaded; ``run`` is what all runs have: the
parser, resuming, what is printed. ``lightning`` and ``rl`` train, with Lightning and with
Stable-Baselines3; ``folder`` has the folder of a run and its lock, ``errors`` the one line for a
mistake.
"""
