"""Writes the reference of the Python names, from the docstrings of what the public modules export."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import aviso_workers
from aviso_workers import errors, spark, testing

HEAD = """# Python reference

What the public modules export, with their docstrings. [Public names](../public-names.md) says what keeps its meaning
between releases.
"""
MODULES = (aviso_workers, errors, testing, spark)
LONGEST = 88


def page() -> str:
    """Return the page: one section for each module, and in it one for each name."""
    written = [HEAD]
    seen: set[int] = set()
    for module in MODULES:
        written.append(f"## {module.__name__}\n\n{_prose(module)}\n")
        for name in module.__all__:
            value = getattr(module, name)
            if id(value) not in seen and not name.startswith("__"):
                seen.add(id(value))
                written += _name(name, value)
    return "\n".join(written)


def _name(name: str, value: Any) -> Iterator[str]:
    yield f"### {name}\n"
    if callable(value) and not _is_error(value):
        yield from _signature(name, value)
    yield f"{_prose(value)}\n"
    if inspect.isclass(value) and not _is_error(value):
        for below, each in _members(value):
            yield f"#### {name}.{below}\n"
            if callable(each):
                yield from _signature(below, each)
            yield f"{_prose(each)}\n"


def _is_error(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, Exception)


def _members(value: type) -> Iterator[tuple[str, Any]]:
    """Yield the public methods and properties of a class that have a docstring, those of its bases included."""
    found: dict[str, Any] = {}
    for owner in reversed(value.__mro__):
        if owner.__module__.startswith("aviso_workers"):
            found |= vars(owner)
    for name, each in found.items():
        each = each.__func__ if isinstance(each, staticmethod | classmethod) else each
        if not name.startswith("_") and (inspect.isfunction(each) or isinstance(each, property)) and each.__doc__:
            yield name, each


def _signature(name: str, value: Callable[..., Any]) -> Iterator[str]:
    """Yield a function's signature as code, with one argument a line where it is long."""
    signature = inspect.signature(value)
    shown = [each for each in signature.parameters.values() if each.name != "self"]
    arguments = [_argument(each) for each in shown]
    kinds = [each.kind for each in shown]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        arguments.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    returned = "" if inspect.isclass(value) else f" -> {_type(signature.return_annotation)}"
    text = f"{name}({', '.join(arguments)}){returned}"
    if len(text) > LONGEST:
        text = f"{name}(\n" + "".join(f"    {each},\n" for each in arguments) + f"){returned}"
    yield f"```python\n{text}\n```\n"


def _argument(argument: inspect.Parameter) -> str:
    stars = "*" * (2 if argument.kind is argument.VAR_KEYWORD else argument.kind is argument.VAR_POSITIONAL)
    default = "" if argument.default is argument.empty else f" = {argument.default!r}"
    if argument.annotation is argument.empty:
        return f"{stars}{argument.name}{default.replace(' ', '')}"
    return f"{stars}{argument.name}: {_type(argument.annotation)}{default}"


def _type(annotation: Any) -> str:
    """Return an annotation as it is written, which is text where annotations are not evaluated."""
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _prose(value: Any) -> str:
    """Return a docstring as Markdown, for which what is indented is code without the `::` before it."""
    return inspect.cleandoc(value.__doc__ or "").replace("\n\n::\n", "\n")
