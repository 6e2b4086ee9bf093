"""tierd: a local LLM daemon that keeps KV pages and weights in three tiers."""
