"""The version of the package."""

from __future__ import annotations

import re

from tierd.daemon.version import version


def test_it_is_a_version():
    assert re.match(r"\d+\.\d+", version())
