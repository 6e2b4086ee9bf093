"""Compiles a grammar in a process of its own, with limits, to see whether it can be: `python -m ...guide_check`.

A grammar is a program from outside for a compiler that is not ours. One that takes too long, too much memory or the
compiler's stack costs this process and not the engine. The grammar comes on the standard input; what is wrong with it
goes to the standard output, nothing when it is sound.
"""

from __future__ import annotations

import resource
import subprocess
import sys

from llguidance import LLMatcher, LLParserLimits

from tierd.daemon.errors import BadRequest

TIMEOUT_S = 5.0
MEMORY_BYTES = 1 << 30
MAX_SAID_CHARS = 200
COMMAND = [sys.executable, "-m", "tierd.daemon.engine.guide_check"]


def limits() -> LLParserLimits:
    """Limits of the compiler, and of a step of a matcher: some 40 ms a byte and some tens of MB at the worst.

    A row holds what may go on at one place of the answer: an ambiguous grammar takes time by its square.
    """
    return LLParserLimits(
        max_items_in_row=1000, max_lexer_states=25_000, max_grammar_size=200_000, verbose_errors=False
    )


def check(grammar: str, param: str, timeout_s: float = TIMEOUT_S) -> None:
    """Raises BadRequest when a grammar is wrong, or takes more time or memory than one may."""
    try:
        done = subprocess.run(
            COMMAND, input=grammar.encode(), capture_output=True, timeout=timeout_s, check=False, start_new_session=True
        )
    except subprocess.TimeoutExpired:
        raise BadRequest(f"{param} takes more than {timeout_s:g} s to compile", hint=_HINT, param=param) from None
    if done.returncode:
        raise BadRequest(f"{param} is too large to compile", hint=_HINT, param=param)
    if said := done.stdout.decode(errors="replace").strip():
        raise BadRequest(f"{param}: {said}", param=param)


_HINT = "make it simpler: fewer alternatives, smaller bounds"


def main() -> int:
    """Check the grammar on the standard input."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (int(TIMEOUT_S) + 1, int(TIMEOUT_S) + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    said = LLMatcher.validate_grammar(sys.stdin.buffer.read().decode(), None, limits=limits())
    if said and not said.startswith("WARNING"):
        sys.stdout.write(" ".join(said.split())[:MAX_SAID_CHARS])
    return 0


if __name__ == "__main__":
    sys.exit(main())
