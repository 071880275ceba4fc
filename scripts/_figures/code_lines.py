"""Lines of code: what is left of a module without its prose, its imports, its types and its brackets.

Who explains more, names a type or breaks a line is not charged for it.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator

BRACKETS = frozenset(("(", ")", "[", "]", "{", "}", "})", "])", "),", "):"))
NO_CODE = frozenset(
    (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
)


def count(source: str) -> int:
    """Return how many lines of a module are code."""
    lines = source.splitlines()
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    used = {line for each in tokens if each.type not in NO_CODE for line in range(each.start[0], each.end[0] + 1)}
    left_out = {line for node in _left_out(ast.parse(source)) for line in _lines(node)}
    return sum(lines[line - 1].strip().rstrip(",:") not in BRACKETS for line in used - left_out)


def _left_out(tree: ast.Module) -> Iterator[ast.stmt | ast.expr]:
    """Return the nodes that are no code: texts of several words (so also docstrings), imports, and what only types."""
    for node in ast.walk(tree):
        match node:
            case ast.Import() | ast.ImportFrom() | ast.JoinedStr() | ast.If(test=ast.Name(id="TYPE_CHECKING")):
                yield node
            case ast.Constant(value=str(text)) if " " in text:
                yield node
            case ast.Expr(value=ast.Constant(value=str())):
                yield node
            case ast.FunctionDef() | ast.AsyncFunctionDef() if "overload" in map(ast.unparse, node.decorator_list):
                yield node
            case ast.ClassDef() if any("Protocol" in ast.unparse(base) for base in node.bases):
                yield node
            case ast.Assign(value=ast.Call(func=ast.Name(id="TypeVar" | "ParamSpec"))):
                yield node


def _lines(node: ast.stmt | ast.expr) -> range:
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return range(min((each.lineno for each in decorators), default=node.lineno), (node.end_lineno or 0) + 1)
