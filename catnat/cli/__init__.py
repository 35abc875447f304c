"""The command line behind train.py and the command catnat.

``options`` knows which model, head and data a command line asks for; ``run`` is what all runs have:
names of options, resuming, what is printed. ``lightning`` and ``rl`` train, with Lightning and with
Stable-Baselines3; ``folder`` has the folder of a run, ``end_of_run`` what is printed and kept at
the end; ``errors`` has the one line for a mistake.
"""
