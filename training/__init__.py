"""The training program behind train.py and the command catnat.

``main`` reads a command line: ``names`` (which model, head and data), then ``options``. ``command``
has the steps that all models share; ``lightning`` and ``rl`` have what differs, as a ``program``.
"""

if __name__ != "catnat.training":  # imported by the bare name of the folder
    __path__ = []  # no submodules: they would be other modules than those of catnat.training
