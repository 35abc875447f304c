"""The command line behind train.py and the command catnat.

``names`` and ``request`` read names and files before PyTorch is imported. ``parsing`` is the
LightningCLI. ``lightning`` and ``rl`` build a run, ``run`` executes it; ``resume`` and ``folder``
say what a resumed run may change and who writes to its folder.
"""
