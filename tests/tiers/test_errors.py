"""The drawn tree of errors is the real one."""

from __future__ import annotations

import inspect
import re

from tierd.tiers import errors


def test_docstring_draws_the_real_tree() -> None:
    drawn: dict[str, str] = {}
    path: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        if found := re.match(r"([│├└─ ]*)([A-Z]\w+)", line):
            depth, name = len(found[1]), found[2]
            if name not in vars(errors):
                continue
            while path and path[-1][0] >= depth:
                path.pop()
            drawn[name] = path[-1][1] if path else "Exception"
            path.append((depth, name))
    real = {
        name: kind.__mro__[1].__name__
        for name, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, Exception)
    }
    assert drawn == real


def test_errors_say_what_to_count_and_whom_to_ask() -> None:
    lost = errors.PageLost(errors.LostReason.KEY, "slot 3 holds another page")
    assert lost.reason is errors.LostReason.KEY
    assert str(lost) == "page lost (key): slot 3 holds another page"
    assert "process 12" in str(errors.StoreLocked("/somewhere", 12))
    assert "another process" in str(errors.StoreLocked("/somewhere", None))
