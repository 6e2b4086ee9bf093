"""The database behind the index of a store on the simulated disk."""

from __future__ import annotations

import errno
import sqlite3
from typing import TYPE_CHECKING, Any

from tests.tiers.faults import failure

if TYPE_CHECKING:
    from tests.sim.disk import SimDisk


class Connection:
    """One of the store's two connections to the database behind the index."""

    def __init__(self, disk: SimDisk, real: sqlite3.Connection) -> None:
        self._disk = disk
        self._real = real

    def execute(self, sql: str, *args: Any) -> Any:
        self._before(sql)
        return self._real.execute(sql, *args)

    def executemany(self, sql: str, *args: Any) -> Any:
        self._before(sql)
        return self._real.executemany(sql, *args)

    def close(self) -> None:
        self._disk._connections -= 1
        if self._real.in_transaction:
            self._real.rollback()

    def _before(self, sql: str) -> None:
        disk, word = self._disk, sql.split()[0]
        disk._enter(f"sql {word}")
        if disk.faults.full and word in ("INSERT", "UPDATE", "COMMIT", "VACUUM"):
            disk.fired["index full"] = disk.fired.get("index full", 0) + 1
            raise failure("sql", errno.ENOSPC)
        if disk._happens(disk.faults.index_error, "index error"):
            raise failure("sql", errno.EIO)
