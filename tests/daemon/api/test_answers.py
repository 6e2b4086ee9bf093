"""Headers of errors."""

from __future__ import annotations

import json

import pytest

from tierd.daemon import errors
from tierd.daemon.api.answers import error_response, json_response


@pytest.mark.parametrize("kind", errors.TABLE)
def test_headers_tell_clients_whether_to_try_again(kind):
    response = error_response(kind("x"))
    assert response.status == kind("x").status
    retry = issubclass(kind, errors.TryLater)
    assert ("Retry-After" in response.headers) == retry
    if retry or kind is errors.EngineFailed:
        assert "x-should-retry" not in response.headers
    else:
        assert response.headers["x-should-retry"] == "false"
    assert ("WWW-Authenticate" in response.headers) == (kind is errors.Unauthorized)


def test_json():
    response = json_response({"a": 1}, status=201, headers={"X": "y"})
    assert json.loads(response.body) == {"a": 1} and response.status == 201 and response.headers["X"] == "y"
    assert response.content_type == "application/json"
