"""How hard stateful tests try: little by default, much behind `long`."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings

# Shrinking a stateful failure takes minutes; the simulator has seeds for the hard ones.
_PHASES = [Phase.explicit, Phase.reuse, Phase.generate]


def small(examples: int, steps: int) -> settings:
    """Settings of the default suite."""
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
        phases=_PHASES,
    )


def big(examples: int, steps: int) -> settings:
    """Settings behind `long`; nothing is kept of what they found, so a run is as good on a machine as on another."""
    return settings(small(examples, steps), database=None)
