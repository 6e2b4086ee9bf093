"""The systemd unit of the daemon, as text; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

NAME = "tierd.service"
WATCHDOG_S = 30  # without a sign of life for so long the front is restarted
STOP_S = 30  # the daemon needs under 10 s; a disk that is slow to flush may need more
# Usage, permission and a bad setting: the next start would end in the same way.
FINAL_EXIT_CODES = (2, 77, 78)

_UNIT = """\
[Unit]
Description=tierd, a local LLM daemon
StartLimitIntervalSec=60
StartLimitBurst=5

[Service]
Type=notify
NotifyAccess=main
ExecStart={command}
{environment}WatchdogSec={watchdog_s}
Restart=on-failure
RestartSec=2
RestartPreventExitStatus={final}
TimeoutStartSec=60
TimeoutStopSec={stop_s}
# The front alone is told to stop: it lets its engines flush, and ends them.
KillMode=mixed
OOMPolicy=continue
LimitNOFILE=65536
LimitMEMLOCK=infinity
NoNewPrivileges=yes
UMask=0077

[Install]
WantedBy=default.target
"""


def unit_text(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """The unit that runs this command, with these variables set."""
    lines = [f"Environment={_quoted(f'{name}={value}')}\n" for name, value in sorted(environment.items())]
    return _UNIT.format(
        command=" ".join(_quoted(word).replace("$", "$$") for word in command), environment="".join(lines),
        watchdog_s=WATCHDOG_S, stop_s=STOP_S, final=" ".join(map(str, FINAL_EXIT_CODES)),
    )  # fmt: skip


def _quoted(word: str) -> str:
    """A word as systemd.syntax(7) has it. `%` begins a specifier; what else is special is so in quotes alone."""
    text = word.replace("%", "%%")
    if word and all(char.isalnum() or char in "%+,-./:=@_~[]{}$" for char in word):
        return text
    text = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
    return f'"{text}"'
