"""/docs: the OpenAPI description as a page without scripts, and without anything from elsewhere."""

from __future__ import annotations

import html
from collections.abc import Iterator
from typing import Any

from headrank.serving.call import Json

_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.55 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1.5rem 1.25rem 4rem; }
h2 { font-size: 1.1rem; margin: 2rem 0 .3rem; padding-top: .8rem;
  border-top: 1px solid color-mix(in srgb, currentColor 25%, transparent); }
code { font-size: .92em; } table { border-collapse: collapse; margin: .4rem 0; } p { margin: .2rem 0; }
th, td { text-align: left; vertical-align: top; padding: .2rem .9rem .2rem 0; overflow-wrap: anywhere; }
th { font-weight: 500; white-space: nowrap; }
"""


def api_page(description: Json) -> str:
    """The page of an OpenAPI description."""
    schemas = description.get("components", {}).get("schemas", {})
    parts = [
        _operation(path, verb, facts, schemas)
        for path, verbs in description["paths"].items()
        for verb, facts in verbs.items()
    ]
    title = html.escape(f"{description['info']['title']} {description['info']['version']}")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        'content="width=device-width, initial-scale=1">'
        f'<title>{title}: API</title><link rel="icon" '
        f'href="data:,"><style>{_STYLE}</style></head><body><main><h1>{title}</h1>'
        '<p>Machine-readable: <a href="/openapi.json">/openapi.json</a>. Where the server has keys, send '
        "<code>Authorization: Bearer KEY</code>. Unknown fields are ignored.</p>"
        + "".join(parts)
        + "</main></body></html>\n"
    )


def _operation(path: str, verb: str, facts: Json, schemas: Json) -> str:
    rows = [
        *_parameters(facts),
        *_fields(facts.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema"), schemas),
    ]
    table = "".join(
        f"<tr><th><code>{html.escape(name)}</code></th><td>{html.escape(text)}</td></tr>" for name, text in rows
    )
    errors = "; ".join(
        f"{status}: {answer.get('description', '')}"
        for status, answer in facts.get("responses", {}).items()
        if status != "200"
    )
    return (
        f"<h2><code>{verb.upper()} {html.escape(path)}</code></h2><p>{html.escape(facts.get('summary', ''))}</p>"
        + (f"<table>{table}</table>" if table else "")
        + (f"<p><small>{html.escape(errors)}</small></p>" if errors else "")
    )


def _parameters(facts: Json) -> Iterator[tuple[str, str]]:
    for parameter in facts.get("parameters", []):
        yield parameter["name"], f"in the {parameter['in']}" + (", needed" if parameter.get("required") else "")


def _fields(schema: Any, schemas: Json) -> Iterator[tuple[str, str]]:
    """Each field of a body once, also where one of several bodies is expected."""
    seen: set[str] = set()
    for body in _bodies(schema, schemas):
        # the fields without which there is no request come first
        for name, field in sorted(
            body.get("properties", {}).items(), key=lambda item: item[0] not in body.get("required", [])
        ):
            if name not in seen:
                seen.add(name)
                needed = ", needed" if name in body.get("required", []) else ""
                yield name, f"{_kind(field)}{needed}. {field.get('description', '')}".strip()


def _bodies(schema: Any, schemas: Json) -> Iterator[Json]:
    if not schema:
        return
    if "$ref" in schema:
        yield from _bodies(schemas.get(schema["$ref"].rpartition("/")[2]), schemas)
    elif "oneOf" in schema or "anyOf" in schema:
        for member in schema.get("oneOf", schema.get("anyOf")):
            yield from _bodies(member, schemas)
    else:
        yield schema


def _kind(field: Json) -> str:
    """The type in words: string, list of (string or object), ..."""
    if "$ref" in field:
        return "object"
    if "anyOf" in field:
        names = dict.fromkeys(_kind(member) for member in field["anyOf"] if member.get("type") != "null")
        return " or ".join(names)
    if field.get("type") == "array":
        return f"list of ({_kind(field.get('items', {}))})"
    if "enum" in field:
        return " or ".join(map(str, field["enum"]))
    return str(field.get("type", "any"))
