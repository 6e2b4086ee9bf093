from __future__ import annotations

from tierd.daemon.engine.model.weights_status import PassMeter


def test_the_rate_is_that_of_the_last_passes() -> None:
    meter = PassMeter()
    assert meter.bytes_per_s == meter.peak_bytes_per_s == 0.0
    read_bytes = 0
    for begun_s in range(0, 1000, 10):  # what lies between two passes does not count
        meter.begin(begun_s)
        read_bytes += 300
        meter.end(begun_s + 2.0, read_bytes, 100.0)
    assert abs(meter.bytes_per_s - 150.0) < 1e-6 and abs(meter.peak_bytes_per_s - 150.0) < 1e-6
    for begun_s in range(2000, 2400, 10):
        meter.begin(begun_s)
        read_bytes += 300
        meter.end(begun_s + 6.0, read_bytes, 100.0)
    assert abs(meter.bytes_per_s - 50.0) < 0.1 and meter.peak_bytes_per_s == 100.0
