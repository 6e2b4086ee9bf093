from __future__ import annotations

import numpy as np

from tests.daemon.engine.fakes import PAGE, RECORD, FakeDecoder, expected
from tierd.daemon.engine.batch import Rows, build
from tierd.daemon.engine.runner import Runner


def test_rows_go_into_their_pages_and_logits_come_out() -> None:
    arena = np.zeros((6, RECORD), np.uint8)
    runner = Runner(FakeDecoder(), arena)
    prompt = [5, 6, 7, 8, 9]
    logits = runner.run(build([Rows(prompt, 0, [4, 2], sample=True)], PAGE))
    assert [int(np.argmax(logits[0]))] == expected(prompt, 1)
    assert arena[[4, 2]].any(axis=1).all() and not arena[[0, 1, 3, 5]].any()
