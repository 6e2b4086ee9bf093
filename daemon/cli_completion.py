"""The verb `completion`: a script that has the shell complete verbs and flags of tierd."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

VARIABLE = "_TIERD_COMPLETE"  # how the script asks `cli.main` for words
_PLACES = {
    "bash": 'eval "$(tierd completion bash)"  in ~/.bashrc',
    "zsh": 'eval "$(tierd completion zsh)"  in ~/.zshrc',
    "fish": "tierd completion fish > ~/.config/fish/completions/tierd.fish",
}


@click.command(epilog="\b\n" + "\n".join(_PLACES.values()))
@click.argument("shell", type=click.Choice(list(_PLACES)))
def completion(shell: str) -> None:
    """Print the completion script of a shell."""
    found = get_completion_class(shell)
    assert found is not None, shell  # click has these three
    script = found(click.Group("tierd"), {}, "tierd", VARIABLE)
    # Not `source()`: it runs bash to see its version, which says nothing about the shell that will read this.
    print(script.source_template % script.source_vars())
