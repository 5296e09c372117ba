"""`headrace completion`: what a shell needs to complete our commands."""

import click

SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print the completion script of a SHELL.

    \b
    eval "$(headrace completion bash)"                                  # in ~/.bashrc
    eval "$(headrace completion zsh)"                                   # in ~/.zshrc
    headrace completion fish > ~/.config/fish/completions/headrace.fish
    """
    from click.shell_completion import get_completion_class

    from headrace.cli.app import root

    found = get_completion_class(shell)
    assert found is not None
    script = found(root, {}, "headrace", "_HEADRACE_COMPLETE").source()
    # click's script for fish cuts what it says of a command at the first comma: only the first one parts anything.
    click.echo(script.replace('(string split "," $completion)', '(string split -m 1 "," $completion)'))
