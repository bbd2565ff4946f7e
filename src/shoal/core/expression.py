"""Parses method expressions such as `fedprox(mu=0.1)+scaffold`, without evaluating any code."""

import ast
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, get_args, get_type_hints

from shoal.core.compose import Method, compose
from shoal.core.errors import ShoalError, unknown_name_error
from shoal.core.part import Part

MAX_EXPRESSION_LENGTH = 2000


def parse_method(text: str, known: Mapping[str, type[Part]], presets: Mapping[str, str]) -> Method:
    """The composed method of an expression; `known` are the parts by name, `presets` expressions by name."""
    return compose([make_part(name, values, known) for name, values in read_part_list(text, known, presets)])


def read_part_list(
    text: str, known: Mapping[str, type[Part]], presets: Mapping[str, str]
) -> list[tuple[str, dict[str, Any]]]:
    """The parts that an expression lists, each a name and its values; presets are replaced by their parts."""
    if len(text) > MAX_EXPRESSION_LENGTH:
        raise expression_error(text, f"it is longer than {MAX_EXPRESSION_LENGTH} characters")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise expression_error(text, "its brackets, commas or plus signs do not fit together") from None
    parts: list[tuple[str, dict[str, Any]]] = []
    for node in split_terms(tree, text):
        name, values = parse_call(node, text)
        if name in known:
            parts.append((name, values))
        elif name in presets and values:
            raise expression_error(
                text, f"{name} is a preset and takes no values; write out {presets[name] or 'its parts'}"
            )
        elif name in presets:
            parts.extend(read_part_list(presets[name], known, presets) if presets[name] else [])
        else:
            raise unknown_name_error("method", name, [*known, *presets])
    return parts


def split_terms(node: ast.expr, text: str) -> list[ast.expr]:
    """The terms between the plus signs, from left to right."""
    terms = []
    while isinstance(node, ast.BinOp):
        if not isinstance(node.op, ast.Add):
            raise expression_error(text, "only + can stand between parts")
        terms.append(node.right)
        node = node.left
    return [node, *reversed(terms)]


def parse_call(node: ast.expr, text: str) -> tuple[str, dict[str, Any]]:
    """Name and values of one term: `name` or `name(key=value, ...)`."""
    match node:
        case ast.Name(id=name):
            return name.lower(), {}
        case ast.Call(func=ast.Name(id=name), args=[], keywords=keywords) if all(k.arg for k in keywords):
            names = [str(k.arg) for k in keywords]
            if len(set(names)) < len(names):
                raise expression_error(text, f"{name} is given the same value twice")
            return name.lower(), {str(k.arg): parse_literal(k.value, text) for k in keywords}
        case ast.Call(func=ast.Name(id=name)):
            raise expression_error(text, f"values of {name} need their names, as in {name.lower()}(name=0.1)")
    raise expression_error(text, "a part is a name, or a name with values in brackets")


def parse_literal(node: ast.expr, text: str) -> Any:
    """The value of a literal: a number, True, False or a text in quotes."""
    match node:
        case ast.Constant(value=bool() | int() | float() | str() as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
    raise expression_error(text, "a value is a number, True, False or a text in quotes")


def make_part(name: str, values: Mapping[str, Any], known: Mapping[str, type[Part]]) -> Part:
    """A part from its name and values, each checked for its type and range."""
    cls = known[name]
    try:
        hints = get_type_hints(cls)
    except NameError as error:
        advice = "Give its fields types that Python can find."
        raise ShoalError("bad-part", f"The part {name} has a field of an unknown type ({error}).", advice) from error
    types = {f.name: hints[f.name] for f in fields(cls)}
    values = {cls.renamed_options.get(key, key): value for key, value in values.items()}
    for key in values:
        if key not in types:
            raise unknown_name_error(f"value of {name}", key, types)
    missing = [
        f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING and f.name not in values
    ]
    if missing:
        raise ShoalError("bad-value", f"{name} needs {', '.join(missing)}.", f"Write {name}({missing[0]}=...).")
    try:
        return cls(**{key: fit_field_value(f"{name}({key})", value, types[key]) for key, value in values.items()})
    except (ValueError, OverflowError) as error:
        raise ShoalError("bad-value", f"{error}.", "Give another value.") from error


def fit_field_value(what: str, value: Any, kind: Any) -> Any:
    """The value, if it has the type of the field or one of its types; an int becomes a float where one is wanted."""
    kinds = get_args(kind) or (kind,)
    if type(value) in kinds:
        return value
    if float in kinds and type(value) is int:
        return float(value)
    raise ValueError(f"{what} must be of type {getattr(kind, '__name__', kind)}, got {value!r}")


def expression_error(text: str, why: str) -> ShoalError:
    return ShoalError(
        "bad-expression",
        f"The method {text[:120]!r} cannot be read: {why}.",
        'Write parts with + between them, for example "fedprox(mu=0.1)+scaffold".',
    )
