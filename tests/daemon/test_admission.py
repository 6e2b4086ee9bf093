"""Places for requests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tierd.daemon import keys, tenants
from tierd.daemon.admission import Admission
from tierd.daemon.errors import BadRequest, QuotaExceeded, TooBusy
from tierd.daemon.keys import KeyRing
from tierd.daemon.tenants import Tenants


class Rig:
    def __init__(self, file: Path, bound: int) -> None:
        self.changes = 0
        self.file = file
        self.admission = Admission(Tenants(KeyRing(file)), bound, self._changed)

    def _changed(self) -> None:
        self.changes += 1


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path / "keys", 4)


def test_no_more_than_there_are_places(rig: Rig) -> None:
    wide = rig.admission.book("", 3)
    one = rig.admission.book("a")
    with pytest.raises(TooBusy):
        rig.admission.book("b")
    wide.release()
    rig.admission.book("b", 3)
    one.release()
    with pytest.raises(TooBusy):
        rig.admission.book("b", 2)


def test_what_never_fits_is_told_as_such(rig: Rig) -> None:
    with pytest.raises(BadRequest) as caught:
        rig.admission.book("", 5)
    assert caught.value.param == "n"


def test_what_never_fits_into_what_a_key_may_have_is_told_as_such(rig: Rig) -> None:
    made, _ = keys.add(rig.file, "a", max_requests=2)
    with pytest.raises(BadRequest, match="at most 2"):
        rig.admission.book(tenants.of_key(made), 3)


def test_a_place_is_released_once(rig: Rig) -> None:
    kept, place = rig.admission.book(""), rig.admission.book("")
    for _ in range(2):
        place.release()
    assert rig.changes == 1 and rig.admission.live == 1
    kept.release()
    assert rig.admission.live == 0


def test_a_tenant_has_its_own_bound(rig: Rig) -> None:
    made, _ = keys.add(rig.file, "a", quota_pages=7, max_requests=2)
    name = tenants.of_key(made)
    with rig.admission.book(name, 2) as place:
        assert place.allowance == (7, 2)
        with pytest.raises(QuotaExceeded):
            rig.admission.book(name)
        rig.admission.book("").release()
    rig.admission.book(name, 2).release()


def test_a_drain_does_not_wait_for_everything(rig: Rig) -> None:
    with rig.admission.book("", drains=False):
        assert rig.admission.live == 0
        with rig.admission.book(""):
            assert rig.admission.live == 1
