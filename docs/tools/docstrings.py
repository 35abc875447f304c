"""Docstrings as Markdown: formulas, doctests and cross-references of the API pages."""

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|func|meth|mod|data|attr):`(~?)([\w.]+)`")
_INLINE_MATH = re.compile(r":math:`([^`]+)`")
_MATH = re.compile(r"^\.\. math:: ?(.*(?:\n(?=[ \t]+\S).*)*)", re.M)
_DOCTEST = re.compile(r"^([ \t]*)>>> .*(?:\n\1(?=\S).*)*", re.M)


class MarkdownDocstrings(griffe.Extension):
    """Rewrites docstrings while the API pages are made; the source stays as it is."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called for every module, class, function and attribute."""
        if obj.docstring:
            obj.docstring.value = to_markdown(obj.docstring.value, obj.canonical_path)


def to_markdown(text: str, path: str) -> str:
    """The docstring of the object at ``path`` with its reStructuredText and doctests replaced."""
    text = re.sub(r"::$", ":", text, flags=re.M)  # before a block of code
    text = _MATH.sub(lambda match: f"$$\n{' '.join(match[1].split())}\n$$", text)
    text = _INLINE_MATH.sub(r"$\1$", text)
    text = _DOCTEST.sub(lambda match: _fenced(match[0], match[1]), text)
    parts = re.split(r"(^[ \t]*```.*?^[ \t]*```|``.*?``|\$\$.*?\$\$)", text, flags=re.M | re.S)
    # Shapes such as (*, S) are not emphasis.
    parts[::2] = [
        _ROLE.sub(lambda match: _reference(match[1], match[2], path), part).replace("(*", r"(\*")
        for part in parts[::2]
    ]
    return "".join(parts)


def _fenced(block: str, indent: str) -> str:
    return f"{indent}```pycon\n{block}\n{indent}```"


def _reference(short: str, name: str, path: str) -> str:
    """A link to a name of ours where an API page has it, else the name set as code.

    A name without dots belongs to the class or the module of the docstring.
    """
    shown = name.rsplit(".", 1)[-1] if short else name
    target = name if name.startswith("catnat.") else f"{_home(path)}.{name}"
    return f'<autoref identifier="{target}" optional>`{shown}`</autoref>'


def _home(path: str) -> str:
    """The class of a method, the module of anything else."""
    parts = path.split(".")
    classes = [i for i, part in enumerate(parts) if part[:1].isupper()]
    return ".".join(parts[: classes[0] + 1 if classes and classes[0] < len(parts) - 1 else -1])
