"""``help`` of the package and of its heads is short enough to be read."""

import pydoc

import pytest
import torch

import catnat


def lines(thing) -> list[str]:
    return pydoc.plain(pydoc.render_doc(thing)).splitlines()


def test_help_of_the_package_has_less_than_300_lines():
    shown = lines(catnat)
    assert len(shown) < 300
    assert any("make_head(" in line for line in shown)


@pytest.mark.parametrize("name", ["softmax", "sparsemax", "sigmoid", "natural"])
def test_help_of_a_head_has_less_than_150_lines_and_all_of_its_methods(name):
    head = catnat.make_head(name, 4)
    shown = lines(type(head))
    assert len(shown) < 150
    for method in ("forward", "log_probs", "probs", "inverse", "fisher", "natural_gradient"):
        assert any(f" {method}(" in line for line in shown), method
    assert not any("register_forward_hook" in line for line in shown)


def test_a_head_itself_lists_every_name_that_a_module_has():
    assert set(dir(torch.nn.Module())) <= set(dir(catnat.make_head("natural", 4)))


def test_every_public_name_can_be_imported_and_completed():
    for names in catnat._HOMES.values():
        for name in names:
            assert getattr(catnat, name).__name__ == name
            assert name in dir(catnat)
