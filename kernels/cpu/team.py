"""The threads that compute one launch together: how they share work, wait for each other, sleep and stop.

Numba's own threading layers hand out whole loops and join all threads after each. On a machine that does other work
as well, a join waits for a thread that the kernel has preempted: measured here, with two runnable processes beside
it, OpenMP took 8 ms for a product of 40 us. So a launch is a list of *phases*, and a phase is over when all its *items*
are done, not when all threads have come by: a thread that does not run holds up nobody, the others take its items.

Memory, in int64 words (a cache line apart where threads contend):

    control   [0] 1 when the team stops         [1] launch number        [8] 1 while a launch takes members
              [16] members inside the launch   [24..] pthread mutex     [40..] pthread condition
    phase     [0] next item to hand out        [8] items done           (PHASE_WORDS words each, zero at launch)

Threading: one thread opens launches, one at a time. Workers live in native code without the GIL until `Team.close`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from tierd.kernels.cpu.simd import I32, I64, emit_pointer

CONTROL_WORDS = 64
PHASE_WORDS = 16
PHASE_BYTES = 8 * PHASE_WORDS

_LAUNCH, _OPEN, _MEMBERS, _MUTEX, _CONDITION = 8, 64, 128, 192, 320  # byte offsets
_DONE = 64
_STOP = 1
# A look with `pause` takes some 10-20 ns. Waiting within a launch is for the rest of a partner's item, microseconds;
# waiting for the next launch is for the sampler and the scheduler, and beyond some 100 us sleeping is cheaper.
_SPINS_IN_LAUNCH = 4000
_SPINS_BETWEEN = 6000


@intrinsic
def atomic_add(typingctx, address, value):
    """Adds to the int64 at `address`; returns what it held before. Orders memory both ways."""

    def codegen(ctx, b, sig, args):
        return b.atomic_rmw("add", emit_pointer(b, args[0], I64), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def atomic_load(typingctx, address):
    """Reads the int64 at `address`; what its writer wrote before is visible afterwards."""
    return types.int64(types.int64), lambda ctx, b, sig, args: b.load_atomic(
        emit_pointer(b, args[0], I64), "seq_cst", 8
    )


@intrinsic
def atomic_store(typingctx, address, value):
    """Writes the int64 at `address`; everything written before is visible to who reads it."""

    def codegen(ctx, b, sig, args):
        b.store_atomic(args[1], emit_pointer(b, args[0], I64), "seq_cst", 8)
        return ctx.get_dummy_value()

    return types.none(types.int64, types.int64), codegen


@intrinsic
def pause(typingctx):
    """Tells the core that this is a spin loop (nothing where the architecture has no such instruction)."""

    def codegen(ctx, b, sig, args):
        if b.module.triple.startswith(("x86_64", "i686")):
            type = ir.FunctionType(ir.VoidType(), [])
            b.call(cgutils.get_or_insert_function(b.module, type, "llvm.x86.sse2.pause"), [])
        return ctx.get_dummy_value()

    return types.none(), codegen


def _c_function(name, num_addresses):
    """A function of libc that takes addresses and returns an int (which these never use to report a fault)."""

    def codegen(ctx, b, sig, args):
        type = ir.FunctionType(I32, [I64] * num_addresses)
        return b.call(cgutils.get_or_insert_function(b.module, type, name), args)

    match num_addresses:
        case 0:

            @intrinsic
            def call(typingctx):
                return types.int32(), codegen
        case 1:

            @intrinsic
            def call(typingctx, first):
                return types.int32(types.int64), codegen
        case _:

            @intrinsic
            def call(typingctx, first, second):
                return types.int32(types.int64, types.int64), codegen

    return call


_sched_yield = _c_function("sched_yield", 0)
_mutex_init = _c_function("pthread_mutex_init", 2)
_mutex_lock = _c_function("pthread_mutex_lock", 1)
_mutex_unlock = _c_function("pthread_mutex_unlock", 1)
_condition_init = _c_function("pthread_cond_init", 2)
_condition_wait = _c_function("pthread_cond_wait", 2)
_condition_broadcast = _c_function("pthread_cond_broadcast", 1)


# Inside a launch.


@njit(nogil=True, cache=True)
def take(phase, count):
    """Hands out `count` items of a phase: the first of them. Past the phase's total there are none left."""
    return atomic_add(phase, count)


@njit(nogil=True, cache=True)
def finish(phase, count):
    """Says that `count` taken items are done and their results written."""
    atomic_add(phase + _DONE, count)


@njit(nogil=True, cache=True)
def wait_for(phase, total):
    """Returns when all `total` items of the phase are done; their results are visible then."""
    spins = 0
    while atomic_load(phase + _DONE) < total:
        spins += 1
        if spins < _SPINS_IN_LAUNCH:
            pause()
        else:
            _sched_yield()


# Around a launch.


@njit(nogil=True, cache=True)
def prepare(control):
    """Makes the mutex and the condition in zeroed control words."""
    _mutex_init(control + _MUTEX, 0)
    _condition_init(control + _CONDITION, 0)


@njit(nogil=True, cache=True)
def _advance(control, stop):
    _mutex_lock(control + _MUTEX)
    if stop:
        atomic_store(control, _STOP)
    atomic_add(control + _LAUNCH, 1)
    _condition_broadcast(control + _CONDITION)
    _mutex_unlock(control + _MUTEX)


@njit(nogil=True, cache=True)
def open_launch(control):
    """Lets workers into the launch and wakes them. The caller has prepared the job and zeroed its phases."""
    atomic_store(control + _OPEN, 1)
    _advance(control, False)


@njit(nogil=True, cache=True)
def close_launch(control):
    """Lets no more workers in and waits until those inside have left: then the job may be changed."""
    atomic_store(control + _OPEN, 0)
    spins = 0
    while atomic_load(control + _MEMBERS) > 0:
        spins += 1
        if spins < _SPINS_IN_LAUNCH:
            pause()
        else:
            _sched_yield()


@njit(nogil=True, cache=True)
def enter(control):
    """Joins the launch if it is open. A member counts itself first and looks then; `close_launch` does the opposite
    (both sequentially consistent), so that either the member sees it closed or the closer sees the member."""
    atomic_add(control + _MEMBERS, 1)
    if atomic_load(control + _OPEN) == 1:
        return True
    atomic_add(control + _MEMBERS, -1)
    return False


@njit(nogil=True, cache=True)
def leave(control):
    """Ends a membership."""
    atomic_add(control + _MEMBERS, -1)


@njit(nogil=True, cache=True)
def await_launch(control, seen):
    """Waits for a launch later than number `seen`: its number, or -1 when the team stops."""
    spins = 0
    while spins < _SPINS_BETWEEN and atomic_load(control + _LAUNCH) == seen:
        spins += 1
        pause()
    if atomic_load(control + _LAUNCH) == seen:
        _mutex_lock(control + _MUTEX)
        while atomic_load(control + _LAUNCH) == seen:
            _condition_wait(control + _CONDITION, control + _MUTEX)
        _mutex_unlock(control + _MUTEX)
    if atomic_load(control) == _STOP:
        return -1
    return atomic_load(control + _LAUNCH)


class Team:
    """Owner of the workers: `threads - 1` of them, beside the thread that calls.

    `work(*arguments, control, worker)` is a compiled function that releases the GIL; called with a worker from 1 on it
    serves launches until `await_launch` returns -1. A team that is garbage collected, or left over when the
    interpreter exits, closes itself.
    """

    def __init__(self, threads: int, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if threads < 1:
            raise ValueError(f"threads must be at least 1, got {threads}")
        self.control = np.zeros(CONTROL_WORDS + 8, np.int64)
        self.address = -(-self.control.ctypes.data // 64) * 64
        prepare(self.address)
        self._workers = [
            threading.Thread(target=work, args=(*arguments, self.address, i), name=f"tierd-cpu-{i}", daemon=True)
            for i in range(1, threads)
        ]
        self.close = weakref.finalize(self, _stop, self.address, self._workers, self.control, arguments)
        for worker in self._workers:
            worker.start()


def _stop(address: int, workers: list[threading.Thread], *kept_alive: object) -> None:
    """Stops and joins the workers; what they point into lives at least until then."""
    _advance(address, True)
    for worker in workers:
        worker.join()
