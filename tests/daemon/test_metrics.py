"""Counters and their text."""

from __future__ import annotations

import json
import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tierd.daemon.metrics import TIERS, Histogram, Metrics

DASHBOARD = Path(__file__).resolve().parents[2] / "docs" / "grafana.json"
LINK = {"total_bytes": 7, "active_s": 0.5, "waited_s": 0.25, "errors": 0, "queued": 2, "count": 3, "bytes_per_s": 1.0}
ENGINE = {
    "model": 'we"ird\\\n', "state": "ready", "steps": 5, "running": 1, "waiting": 2, "preemptions": 0,
    "prefill_tokens_per_s": 1.5, "decode_tokens_per_s": 2.5,
    "tiers": {"nvme": {"used_pages": 4, "used_bytes": 8, "state": "on", "ok": True}, "x": 5},
    "links": {"disk_read": LINK, "odd": 3},
    "writes": {"written_bytes": 10, "skipped_pages": 1, "refused_pages": 0, "today_bytes": 9, "daily_bytes": 100},
    "store": {"lost_pages": 0, "failure": ""},
    "streaming": {"read_bytes": 3, "waited_s": 0.1, "ring_bytes": 4, "lost_steps": 0},
    "speculation": {"mode": "auto", "drafted_tokens": 30, "right_drafts": 20,
                    "draft": {"drafted_tokens": 12, "right_drafts": 9, "spent_s": 0.5, "memory_bytes": 7}},
    "weights": {"memory_bytes": 50, "nvme_bytes": 900, "read_bytes": 1800, "waited_s": 0.5, "uses": 20, "hits": 18,
                "retries": 1, "lost": 0, "bytes_per_s": 2000},
}  # fmt: skip
TIMINGS = {"queue_ms": 30.0, "restore_ms": 400.0, "hit_device": 16, "hit_host": 0, "hit_nvme": 200}


def families(metrics: Metrics, *engines):
    return {family.name: family for family in text_string_to_metric_families(metrics.render(2, engines, 12.5))}


def busy() -> Metrics:
    metrics = Metrics()
    usage = {"prompt_tokens": 5, "cached_tokens": 3, "completion_tokens": 7}
    metrics.ended("http", "done", usage, deaths=1, ttft_s=0.03, timings=TIMINGS)
    metrics.ended("unix", "failed", {}, deaths=0, ttft_s=None)
    metrics.ended("unix", "done", {}, deaths=0, ttft_s=1000.0)
    metrics.engine_deaths.update(["a"])
    return metrics


def values(family, suffix: str, label: str = "le"):
    return {s.labels.get(label): s.value for s in family.samples if s.name.endswith(suffix)}


def test_the_text_is_what_prometheus_reads():
    found = families(busy(), ENGINE)
    requests = {tuple(s.labels.values()): s.value for s in found["tierd_requests"].samples}
    assert requests == {("http", "done"): 1, ("unix", "failed"): 1, ("unix", "done"): 1}
    tier = {s.labels["state"]: s for s in found["tierd_tier"].samples}
    assert set(tier) == {"used_pages", "used_bytes"}  # numbers alone
    assert tier["used_pages"].labels == {"model": 'we"ird\\\n', "tier": "nvme", "state": "used_pages"}
    assert tier["used_pages"].value == 4
    ttft = values(found["tierd_time_to_first_token_seconds"], "_bucket")
    assert ttft["0.025"] == 0 and ttft["0.05"] == 1 and ttft["300"] == 1 and ttft["+Inf"] == 2
    assert found["tierd_resumed_requests"].samples[0].value == 1
    assert found["tierd_completion_tokens"].samples[0].value == 7


def test_histograms_of_queue_hits_and_restores():
    found = families(busy())
    queue = values(found["tierd_queue_seconds"], "_bucket")
    assert queue["0.025"] == 0 and queue["0.05"] == 1
    restore = found["tierd_restore_seconds"]
    assert values(restore, "_bucket")["0.25"] == 0 and values(restore, "_bucket")["0.5"] == 1
    assert values(restore, "_sum") == {None: 0.4}
    hits = found["tierd_request_hit_tokens"]
    assert values(hits, "_sum", "tier") == {"device": 16, "host": 0, "nvme": 200}
    assert values(hits, "_count", "tier") == dict.fromkeys(TIERS, 1)
    assert values(found["tierd_hit_tokens"], "_total", "tier") == {"device": 16, "host": 0, "nvme": 200}


def test_a_request_that_restored_nothing_is_no_restore():
    metrics = Metrics()
    metrics.ended("http", "done", {}, deaths=0, ttft_s=0.1, timings={**TIMINGS, "restore_ms": 0.0})
    assert values(families(metrics)["tierd_restore_seconds"], "_count") == {None: 0}


def test_links_writes_and_streaming_of_each_engine():
    found = families(Metrics(), ENGINE, {"model": "new", "state": "starting"})
    assert [(s.labels["link"], s.value) for s in found["tierd_link_bytes"].samples] == [("disk_read", 7)]
    assert found["tierd_store_written_bytes"].samples[0].value == 10
    assert found["tierd_streamed_bytes"].samples[0].value == 3
    assert {s.labels["model"]: s.value for s in found["tierd_engine_up"].samples} == {ENGINE["model"]: 1, "new": 0}


def test_streamed_weights_of_each_engine():
    found = families(Metrics(), ENGINE, {"model": "resident", "state": "ready", "weights": {}})
    told = {
        name: family.samples[0].value for name, family in found.items()
        if name.startswith("tierd_weights_") and len(family.samples) == 1
    }  # fmt: skip
    assert told == {
        "tierd_weights_memory_bytes": 50, "tierd_weights_disk_bytes": 900, "tierd_weights_read_bytes": 1800,
        "tierd_weights_wait_seconds": 0.5, "tierd_weights_uses": 20, "tierd_weights_hits": 18,
        "tierd_weights_retries": 1, "tierd_weights_lost": 0, "tierd_weights_bytes_per_second": 2000,
    }  # fmt: skip


def test_what_is_not_finite_is_not_counted():
    histogram = Histogram((1.0,))
    for value in (float("nan"), float("inf"), -float("inf"), 0.5, 2.0):
        histogram.add(value)
    assert histogram.counts == [1, 1] and histogram.total == 2.5


def test_labels_do_not_grow_with_what_comes_in():
    metrics = busy()
    before = len(metrics.render(0, [ENGINE], 0.0).splitlines())
    for number in range(1000):
        timings = {**TIMINGS, f"odd_{number}": 1.0, "hit_device": number}
        metrics.ended("http", "done", {f"x{number}": 1}, deaths=0, ttft_s=float(number), timings=timings)
    assert len(metrics.render(0, [ENGINE], 0.0).splitlines()) == before


def test_it_is_empty_at_first():
    list(text_string_to_metric_families(Metrics().render(0, [], 0.0)))


def test_the_dashboard_asks_for_metrics_that_exist():
    there = {s.name for family in families(busy(), ENGINE).values() for s in family.samples}
    board = json.loads(DASHBOARD.read_text())
    asked = {
        name
        for panel in board["panels"]
        for target in panel["targets"]
        for name in re.findall(r"\btierd_[a-z0-9_]+", target["expr"])
    }
    assert asked and asked <= there
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids)) and board["title"] == "tierd" and board["schemaVersion"] >= 36
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24 and panel["title"] and panel["targets"]
        assert all(target["datasource"]["uid"] == "${datasource}" for target in panel["targets"])


def test_what_was_drafted():
    found = families(busy(), ENGINE)
    names = ("drafted_tokens", "accepted_tokens", "draft_model_drafted_tokens", "draft_model_accepted_tokens")
    assert [found[f"tierd_{name}"].samples[0].value for name in names] == [30, 20, 12, 9]
    assert found["tierd_draft_model_spent_seconds"].samples[0].value == 0.5
    assert found["tierd_draft_model_memory_bytes"].samples[0].value == 7


def test_a_card_that_is_watched() -> None:
    card = {"state": "watching", "free_bytes": 5, "others_bytes": 7, "yielded_bytes": 3, "yields": 2, "returns": 1}
    text = Metrics().render(0, [], 1.0, card)
    found = {family.name: family.samples[0].value for family in text_string_to_metric_families(text) if family.samples}
    assert found["tierd_card_watched"] == 1 and found["tierd_card_yielded_bytes"] == 3
    assert found["tierd_card_yields"] == 2 and found["tierd_card_others_bytes"] == 7
    assert "tierd_card_watched 0" in Metrics().render(0, [], 1.0, {"state": "off"})
    assert "tierd_card" not in Metrics().render(0, [], 1.0, {})
