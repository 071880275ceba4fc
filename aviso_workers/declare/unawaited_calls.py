"""The calls in an author's function whose coroutine is dropped: without an `await` nothing of them runs.

`App.mistakes` asks. Such a call is found where it is a statement, part of a condition (a coroutine is always true), or
in an f-string, and only where the name of what is called is a global of the function's module, or of a function around
it: what a local variable holds is not known.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

from aviso_workers.declare.agents import Agent, Router
from aviso_workers.declare.tables import Counter, Table
from aviso_workers.declare.timers import Timer

__all__ = ["unawaited_calls"]

NESTED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


def unawaited_calls(function: Callable[..., Any]) -> list[str]:
    """Return each call of a coroutine function that the function makes and drops, with its line and the cure."""
    if isinstance(function, MethodType):
        function = function.__func__
    if not isinstance(function, FunctionType):
        return []
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return []  # such as a function that was made at run time
    if len(tree.body) != 1 or not isinstance(tree.body[0], ast.FunctionDef | ast.AsyncFunctionDef):
        return []
    names = _names(function)
    awaits = isinstance(tree.body[0], ast.AsyncFunctionDef)
    found = []
    for node in _own_nodes(tree.body[0]):
        for call in _dropped(node):
            if inspect.iscoroutinefunction(_called(call.func, names)):
                text = ast.unparse(call.func)
                line = function.__code__.co_firstlineno + call.lineno - 1
                cure = f"`await {text}(...)`" if awaits else _cure_of_a_plain_function(call.func, names)
                found.append(f"line {line}: nothing of `{text}(...)` runs, because it is not awaited: {cure}")
    return found


def _dropped(node: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls of which a node takes the value as it is: it drops it, asks whether it is true, or prints it."""
    match node:
        case ast.Expr(ast.Call() as call) | ast.FormattedValue(ast.Call() as call):
            yield call
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test) | ast.Assert(test=test):
            yield from _asked(test)


def _asked(test: ast.expr) -> Iterator[ast.Call]:
    match test:
        case ast.Call():
            yield test
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield from _asked(operand)
        case ast.BoolOp(values=values):
            for value in values:
                yield from _asked(value)
        case ast.Compare(left=left, comparators=others):
            for value in (left, *others):
                yield from _asked(value)


def _names(function: FunctionType) -> Mapping[str, Any]:
    """Return the values of the names that are no local variables of the function."""
    code = function.__code__
    local = {*code.co_varnames, *code.co_cellvars}
    around = {}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            around[name] = cell.cell_contents
        except ValueError:
            local.add(name)  # it has no value yet
    return {name: value for name, value in {**function.__globals__, **around}.items() if name not in local}


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what is in a function, without the functions and classes in it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, NESTED):
            yield child
            yield from _own_nodes(child)


def _called(node: ast.expr, names: Mapping[str, Any]) -> object:
    """Return the function that a call calls; None where it is not known without running code of the author's."""
    if isinstance(node, ast.Name):
        found = names.get(node.id)
        return found.function if isinstance(found, Agent | Timer) else found
    if not isinstance(node, ast.Attribute):
        return None
    holder = _called(node.value, names)
    if isinstance(holder, ModuleType):
        return vars(holder).get(node.attr)
    if isinstance(holder, Router | Table | Counter):
        method = inspect.getattr_static(type(holder), node.attr, None)
        return inspect.unwrap(method) if callable(method) else None  # below `event_loops.awaited`
    return None


def _cure_of_a_plain_function(node: ast.expr, names: Mapping[str, Any]) -> str:
    if isinstance(node, ast.Attribute) and hasattr(type(_called(node.value, names)), f"{node.attr}_sync"):
        return f"`{ast.unparse(node)}_sync(...)`"
    return f"make the function `async def`, and `await {ast.unparse(node)}(...)`"
