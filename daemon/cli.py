"""The command line: `tierd VERB`.

Exit codes: 0, 1 failed, 2 usage, 69 no daemon, 75 try later, 77 permission, 78 bad config, 130 interrupted.

Only the module of the verb that was typed is imported. Every error is one line `error: ...`, with `hint: ...` below it
when there is a next step; a traceback shows with TIERD_DEBUG=1 alone.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO, TypeVar, cast

import click

from tierd.daemon.cli_common import UTF8_HINT, debugging, not_text, note, print_error
from tierd.daemon.errors import Aborted, BadRequest, TierdError, from_wire, suggest, to_wire

T = TypeVar("T")

# Verb -> module (of this room, unless it is named whole) and function; the order is that of the help.
VERBS = {
    "run": "cli_run:run", "batch": "cli_batch:batch",
    "ps": "cli_use:ps", "load": "cli_use:load", "unload": "cli_use:unload",
    "pull": "cli_models:pull", "list": "cli_models:list_", "show": "cli_models:show", "rm": "cli_models:rm",
    "serve": "cli_daemon:serve", "start": "cli_daemon:start", "stop": "cli_daemon:stop",
    "status": "cli_daemon:status", "top": "tierd.tui.cli:top", "logs": "cli_daemon:logs", "resize": "cli_use:resize",
    "cache": "cli_cache:cache", "prefix": "cli_prefix:prefix",
    "key": "cli_key:key", "service": "cli_service:service", "launch": "cli_launch:launch",
    "completion": "cli_completion:completion",
    "plan": "cli_plan:plan", "doctor": "cli_doctor:doctor",
    "proxy": "cli_proxy:proxy",
    "config": "cli_config:config_", "version": "cli_config:version",
}  # fmt: skip
ALIASES = {"ls": "list"}


class LazyGroup(click.Group):
    """A group that imports the module of a verb when the verb is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Verbs in the order of the help."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of a verb or of an alias."""
        place = VERBS.get(ALIASES.get(cmd_name, cmd_name))
        if place is None:
            return None
        module, _, name = place.partition(":")
        command = getattr(importlib.import_module(module if "." in module else f"tierd.daemon.{module}"), name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The verb in `args`; raises BadRequest for a word that is none."""
        if args and args[0] not in {**VERBS, **ALIASES} and args[0][:1] != "-" and not ctx.resilient_parsing:
            hint = suggest(args[0], [*VERBS, *ALIASES]) or "see `tierd --help`"
            raise BadRequest(f"there is no `tierd {args[0]}`", hint=hint)
        return super().resolve_command(ctx, args)


def _print_version(context: click.Context, option: click.Parameter, wanted: bool) -> None:
    if wanted:
        from tierd.daemon.version import version

        print(f"tierd {version()}")
        context.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--socket", metavar="PATH", help="Unix socket of the daemon.")
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version,
              help="Print the version.")  # fmt: skip
def app(socket: str | None) -> None:
    """A local LLM daemon that keeps pages of KV cache in three tiers and never computes a prefix twice."""
    if socket is not None:
        os.environ["TIERD_SOCKET"] = socket  # for this process and for a daemon that it starts


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line; returns its exit code and never raises."""
    with _streams():
        return _main(list(sys.argv[1:] if arguments is None else arguments))


def _main(argv: list[str]) -> int:
    try:
        if "_TIERD_COMPLETE" in os.environ:
            app.main(prog_name="tierd")
        # Not `app.main`: that turns a reader who went away into exit code 1.
        with app.make_context("tierd", argv or ["--help"]) as context:
            app.invoke(context)
        sys.stdout.flush()
        return 0
    except click.exceptions.Exit as exc:
        return exc.exit_code
    except click.ClickException as exc:
        where = exc.ctx.command_path if isinstance(exc, click.UsageError) and exc.ctx is not None else "tierd"
        print_error(BadRequest(exc.format_message().replace("\n", " "), hint=f"see `{where} --help`"))
        return exc.exit_code
    except (KeyboardInterrupt, EOFError, click.Abort):
        note("")
        return Aborted("").exit_code
    except BrokenPipeError:
        _discard(sys.stdout)  # the reader is gone (`tierd list | head -1`): nothing is left to say
        return 0
    except TierdError as exc:
        if debugging():
            raise
        print_error(exc)
        return exc.exit_code
    except Exception as exc:
        if debugging():
            raise
        if isinstance(exc, UnicodeEncodeError) and (bad := not_text(argv)) is not None:
            print_error(BadRequest(f"argument {argv.index(bad) + 1} is not valid text (UTF-8)", hint=UTF8_HINT))
            return BadRequest("").exit_code
        error = from_wire(to_wire(exc))
        error.hint = "TIERD_DEBUG=1 shows where; please report it"
        print_error(error)
        return error.exit_code


class _Output:
    """The standard output, whose failures have a name of their own: a full disk under it is no fault of a verb."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """As the stream's; raises TierdError where that raises OSError, but for a reader who went away."""
        return self._tell(lambda: self._stream.write(text))

    def flush(self) -> None:
        """As the stream's; raises as `write` does."""
        self._tell(self._stream.flush)

    def _tell(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except BrokenPipeError:
            raise
        except OSError as exc:
            _discard(self._stream)
            hint = "lead it to a file or a terminal that takes it"
            raise TierdError(f"cannot write the output: {exc.strerror}", hint=hint) from None


@contextlib.contextmanager
def _streams() -> Iterator[None]:
    """Named failures of the output; and a file for descriptors that the shell closed (`>&-`).

    The next socket would get a descriptor that is free, and be taken for the output.
    """
    # Open for reading alone: what is printed fails then, as it does on a full disk.
    out = sys.stdout or open(os.open(os.devnull, os.O_RDONLY), "w", encoding="utf-8")
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")
    sys.stdout = cast(TextIO, _Output(out))
    try:
        yield
    finally:
        sys.stdout = out
        try:
            sys.stderr.flush()
        except OSError:
            _discard(sys.stderr)


def _discard(stream: TextIO) -> None:
    """Lead a stream to nowhere: the interpreter flushes it once more at exit."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


if __name__ == "__main__":
    sys.exit(main())
