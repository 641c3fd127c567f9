"""Every endpoint against requests made from its own OpenAPI description: never a 500, and no answer that the
description lacks.

A few examples of each here; `make fuzz` tries several hundred.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from tests.serving_client import PATIENCE, Running, late_heads, running_server, tiny_settings

schemathesis = pytest.importorskip(
    "schemathesis", reason="schemathesis is not installed (it comes with the extra 'dev')"
)
from schemathesis.checks import not_a_server_error  # noqa: E402
from schemathesis.specs.openapi.checks import (  # noqa: E402
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

EXAMPLES = int(os.environ.get("HEADRANK_FUZZ_EXAMPLES", "4"))


@pytest.fixture(scope="module")
def served(
    tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory, embedded_collection: Path
) -> Iterator[Running]:
    heads = late_heads(tmp_path_factory.mktemp("heads"))
    with running_server(
        tiny_settings(tiny_model("qwen3"), heads=heads, collections=(str(embedded_collection),))
    ) as running:
        yield running


def cases(served: Running, mode: schemathesis.GenerationMode) -> Iterator[tuple[str, Any]]:
    """Each endpoint's name and the strategy of its requests. Not through the package's pytest plugin, which pytest 9
    breaks.
    """
    schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
    for found in schema.get_all_operations():
        operation = found.ok()
        described = schema.raw_schema["paths"][operation.path][operation.method]
        if mode is schemathesis.GenerationMode.NEGATIVE and not described.keys() & {"parameters", "requestBody"}:
            continue  # a request without anything in it cannot be made wrong
        yield operation.label, operation.as_strategy(generation_mode=mode)


CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode), ids=lambda mode: mode.name.lower())
def test_no_request_breaks_the_server(served: Running, mode: schemathesis.GenerationMode) -> None:
    names = []
    for name, strategy in cases(served, mode):

        @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        @given(case=strategy)
        def attempt(case: Any) -> None:
            case.call_and_validate(checks=CHECKS, timeout=PATIENCE)

        names.append(name)
        attempt()
    assert "POST /v2/rerank" in names and "POST /playground/view" in names and "GET /playground/queries" in names
