"""Schemas of classes and functions. What is no plain dict takes pydantic, which is asked for only then."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any


class Schema:
    """What an answer must look like, and how its text becomes a value."""

    def __init__(self, wanted: Any) -> None:
        self._adapter = None if isinstance(wanted, Mapping) else _adapter(wanted)
        self.json: dict[str, Any] = (
            dict(wanted) if self._adapter is None else _closed(self._adapter.json_schema())
        )

    def value(self, text: str) -> Any:
        """The value that an answer of this form is."""
        return json.loads(text) if self._adapter is None else self._adapter.validate_json(text)


def tool(definition: Any) -> dict[str, Any]:
    """A tool as the engine takes it: a definition as OpenAI's API has it, its inner part alone, or a function, whose
    name, docstring and annotations say the same."""
    if isinstance(definition, Mapping):
        inner = definition.get("function", definition) if definition.get("type") == "function" else definition
        return dict(inner)
    if not callable(definition):
        raise TypeError(f"a tool is a dict or a function, not {type(definition).__name__}")
    return _function(definition)


def _function(function: Callable[..., Any]) -> dict[str, Any]:
    described = {"name": function.__name__, "parameters": _adapter(function).json_schema()}
    if documentation := inspect.getdoc(function):
        described["description"] = documentation
    return described


def _closed(schema: Any) -> Any:
    """The schema without properties that nobody named: pydantic ignores those, so an answer need not have them."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    values = ("const", "default", "enum", "examples")
    closed = {key: part if key in values else _closed(part) for key, part in schema.items()}
    if schema.get("type") == "object" and isinstance(schema.get("properties"), dict):
        closed.setdefault("additionalProperties", False)
    return closed


def _adapter(wanted: Any) -> Any:
    try:
        from pydantic import TypeAdapter
    except ImportError as error:
        raise ImportError(
            f"a schema of {wanted!r} takes pydantic: pip install pydantic, or give a JSON schema as a dict"
        ) from error
    return TypeAdapter(wanted)
