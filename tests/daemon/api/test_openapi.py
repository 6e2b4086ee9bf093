"""The document of every path: valid, whole, and true to the routes."""

from __future__ import annotations

import json

import pytest

from tierd.daemon.api import openapi


@pytest.mark.long
def test_it_is_valid():
    from openapi_spec_validator import OpenAPIV31SpecValidator  # seconds of processor for its import alone

    document = openapi.document()
    assert list(OpenAPIV31SpecValidator(json.loads(json.dumps(document))).iter_errors()) == []
    assert document["openapi"].startswith("3.1")


async def test_it_has_every_route_and_no_other(http):
    _, document, _ = await http.get("/openapi.json")
    assert document["info"]["title"] == "tierd"
    described = {(method.upper(), path) for path, item in document["paths"].items() for method in item}
    app = http.front.app
    routes = {(route.method, route.resource.canonical) for route in app.router.routes() if route.method != "HEAD"}
    assert described == routes


def test_operations_have_names_of_their_own():
    operations = [one for item in openapi.document()["paths"].values() for one in item.values()]
    ids = [one["operationId"] for one in operations]
    assert len(set(ids)) == len(ids) and all(one["summary"] for one in operations)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_bodies_refer_to_the_types_that_are_decoded(path):
    document = openapi.document()
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    name = schema["$ref"].rpartition("/")[2]
    assert "model" in document["components"]["schemas"][name]["required"]
    assert "text/event-stream" in document["paths"][path]["post"]["responses"]["200"]["content"]
