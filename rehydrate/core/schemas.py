"""JSON Schemas that agents send: checked, bounded, and evaluated in linear time. Nothing is ever fetched."""

from typing import Any, Final
from urllib.parse import unquote

import jsonpointer
import jsonschema_rs

from rehydrate.core.parsing import escape

_PATTERNS: Final = jsonschema_rs.RegexOptions(size_limit=1_000_000)


def _never(uri: str) -> Any:
    raise ValueError(f"a schema may not refer to {uri}")


def _validator(schema: dict[str, Any]) -> Any:
    return jsonschema_rs.validator_for(schema, retriever=_never, pattern_options=_PATTERNS, mask="This")


#: How many parts a schema may unfold to when each reference is followed: checking a value takes that much work.
MAX_PARTS: Final = 2000


#: Keywords whose value maps names of the value's own to schemas.
_BY_NAME: Final = frozenset({"properties", "patternProperties", "dependentSchemas"})


def _unfolded(part: Any, root: dict[str, Any], under: tuple[str, ...], seen: int = 0) -> int:
    """How many parts a schema has with its references followed. ValueError where there is no end to it, or too much."""
    if seen > MAX_PARTS:
        raise ValueError(f"it unfolds to more than {MAX_PARTS} parts")
    if isinstance(part, list):
        for child in part:
            seen = _unfolded(child, root, under, seen)
        return seen
    if not isinstance(part, dict):
        return seen
    seen += 1
    for name, child in part.items():
        if name in _BY_NAME and isinstance(child, dict):
            for one in child.values():
                seen = _unfolded(one, root, under, seen)
        elif name in ("$dynamicRef", "$recursiveRef"):
            raise ValueError(f"{name} is not for here: use $ref")
        elif name == "$ref":
            if not isinstance(child, str) or not (child == "#" or child.startswith("#/")):
                raise ValueError("a reference points into the same schema: #/...")
            if child in under:
                raise ValueError(f"{child} refers to itself")
            seen = _unfolded(_target(root, child[1:]), root, (*under, child), seen)
        elif name not in ("$defs", "definitions", "enum", "const", "default", "examples"):
            seen = _unfolded(child, root, under, seen)
    return seen


def _target(root: dict[str, Any], pointer: str) -> Any:
    try:
        return jsonpointer.resolve_pointer(root, unquote(pointer))
    except jsonpointer.JsonPointerException as error:
        raise ValueError(str(error)) from None


def problem(schema: dict[str, Any]) -> str | None:
    """In one sentence what is wrong with a schema, or None. Patterns are of the kind that cannot hang."""
    try:
        _unfolded(schema, schema, ())
        _validator(schema)
    except (ValueError, jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError, RecursionError) as error:
        return str(error).splitlines()[0][:300]
    return None


def errors(schema: dict[str, Any], value: Any) -> list[dict[str, str]]:
    """`[{pointer, detail}]` of what does not fit, at most twenty; a schema that cannot be used fits nothing."""
    try:
        found = _validator(schema).iter_errors(value)
        return [
            {"pointer": "".join(f"/{escape(str(step))}" for step in error.instance_path), "detail": error.message[:300]}
            for error, _ in zip(found, range(20), strict=False)
        ]
    except (ValueError, jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError, RecursionError) as error:
        return [{"pointer": "", "detail": f"The ask's schema cannot be used: {str(error).splitlines()[0][:200]}"}]
