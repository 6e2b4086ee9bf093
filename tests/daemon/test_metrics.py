"""Counters and their text."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from tierd.daemon.metrics import Metrics


def test_the_text_is_what_prometheus_reads():
    metrics = Metrics()
    usage = {"prompt_tokens": 5, "cached_tokens": 3, "completion_tokens": 7}
    metrics.ended("http", "done", usage, deaths=1, ttft_s=0.03)
    metrics.ended("unix", "failed", {}, deaths=0, ttft_s=None)
    metrics.ended("unix", "done", {}, deaths=0, ttft_s=1000.0)
    metrics.engine_deaths.update(["a"])
    tiers = {"nvme": {"used_pages": 4, "state": "on", "ok": True}, "x": 5}
    engines = [{"model": 'we"ird\\\n', "state": "ready", "tiers": tiers}]
    text = metrics.render(2, engines, 12.5)
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert {f"{f.name}" for f in families.values()} >= {"tierd_requests", "tierd_tier", "tierd_live_requests"}
    requests = {tuple(s.labels.values()): s.value for s in families["tierd_requests"].samples}
    assert requests == {("http", "done"): 1, ("unix", "failed"): 1, ("unix", "done"): 1}
    (tier,) = families["tierd_tier"].samples
    assert tier.labels == {"model": 'we"ird\\\n', "tier": "nvme", "state": "used_pages"} and tier.value == 4
    ttft = {s.labels.get("le", s.name): s.value for s in families["tierd_time_to_first_token_seconds"].samples}
    assert ttft["0.025"] == 0 and ttft["0.05"] == 1 and ttft["300"] == 1 and ttft["+Inf"] == 2
    assert families["tierd_resumed_requests"].samples[0].value == 1
    assert families["tierd_completion_tokens"].samples[0].value == 7


def test_it_is_empty_at_first():
    list(text_string_to_metric_families(Metrics().render(0, [], 0.0)))
