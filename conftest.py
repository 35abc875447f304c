"""Leaves out the doctests of packages whose extra is not installed."""

from importlib.util import find_spec

_NEEDS = {"catnat/jax": "jax", "catnat/integrations": "transformers"}
collect_ignore = [path for path, package in _NEEDS.items() if find_spec(package) is None]
