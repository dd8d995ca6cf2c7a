"""JSON Schemas that agents send: checked, bounded, and evaluated in linear time. Nothing is ever fetched."""

from typing import Any, Final

import jsonschema_rs

from rehydrate.core.parsing import escape

_PATTERNS: Final = jsonschema_rs.RegexOptions(size_limit=1_000_000)


def _never(uri: str) -> Any:
    raise ValueError(f"a schema may not refer to {uri}")


def _validator(schema: dict[str, Any]) -> Any:
    return jsonschema_rs.validator_for(schema, retriever=_never, pattern_options=_PATTERNS)


def problem(schema: dict[str, Any]) -> str | None:
    """In one sentence what is wrong with a schema, or None. Patterns are of the kind that cannot hang."""
    try:
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
