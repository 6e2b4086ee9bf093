"""How memory is divided among engines."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from memory_rig import GB

from tierd.daemon.room import Arenas, Held, divide, left_of, regrown

BYTES = st.integers(0, 20 * GB)
HELD = st.dictionaries(
    st.sampled_from("abcde"), st.builds(Held, st.builds(Arenas, BYTES, BYTES), BYTES, BYTES, st.just(False)),
    min_size=1, max_size=4,
)


@given(usable=st.integers(0, 100 * GB), held=HELD, fixed=BYTES, least=BYTES)
def test_a_division_stays_under_the_cap_and_takes_nothing_it_does_not_need(usable, held, fixed, least):
    division = divide(usable, held, fixed, least)
    device = sum(one.arenas.device for one in held.values())
    host = sum(one.arenas.host for one in held.values())
    if division is None:
        return
    assert division.newcomer.device >= least
    assert division.newcomer.device + sum(one.device for one in division.others.values()) == device
    assert division.newcomer.host + sum(one.host for one in division.others.values()) == host
    for name, arenas in division.others.items():
        assert arenas.device <= held[name].arenas.device and arenas.host <= held[name].arenas.host
    assert device + host + fixed + sum(one.weights + one.workspace for one in held.values()) <= usable


def test_no_room_where_weights_would_not_fit_or_pages_would_be_too_few():
    held = {"a": Held(Arenas(4 * GB, 2 * GB), 2 * GB, GB)}
    assert divide(10 * GB, held, GB, GB) == ({"a": Arenas(2 * GB, GB)}, Arenas(2 * GB, GB))
    assert divide(10 * GB, held, GB + 1, GB) is None
    assert divide(10 * GB, held, GB, 2 * GB + 1) is None


@given(usable=st.integers(0, 100 * GB), held=HELD, fixed=BYTES, least=BYTES, wish=st.builds(Arenas, BYTES, BYTES))
def test_a_wish_is_met_whole_or_not_at_all(usable, held, fixed, least, wish):
    division = divide(usable, held, fixed, least, wish)
    if division is None:
        return
    assert division.newcomer == wish
    for name, arenas in division.others.items():
        assert arenas.device >= min(least, held[name].arenas.device)
        assert arenas.device <= held[name].arenas.device and arenas.host <= held[name].arenas.host
    taken = [wish, *division.others.values(), *(Arenas(one.weights, one.workspace) for one in held.values())]
    assert sum(map(sum, taken)) + fixed <= usable


def test_a_wish_is_met_by_the_others_and_beyond_their_arenas_by_free_memory():
    held = {"a": Held(Arenas(4 * GB, 2 * GB), GB, 0)}
    assert divide(10 * GB, held, GB, GB, Arenas(3 * GB, 0)) == ({"a": Arenas(GB, 2 * GB)}, Arenas(3 * GB, 0))
    assert divide(10 * GB, held, GB, GB, Arenas(5 * GB, 0)) == ({"a": Arenas(2 * GB, GB)}, Arenas(5 * GB, 0))
    assert divide(9 * GB, held, GB, GB, Arenas(5 * GB, 0)) is None


@given(cap=st.builds(Arenas, BYTES, BYTES), held=HELD)
def test_who_stays_grows_up_to_the_cap(cap, held):
    grown = regrown(cap, held)
    before = left_of(cap, {name: one.arenas for name, one in held.items()})
    for name, arenas in grown.items():
        assert arenas.device >= held[name].arenas.device and arenas.host >= held[name].arenas.host
    added = sum(grown[name].device - held[name].arenas.device for name in held)
    assert added <= before.device
    if len(held) == 1:
        (arenas,) = grown.values()
        assert arenas.device == max(cap.device, held[next(iter(held))].arenas.device)
