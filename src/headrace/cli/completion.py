"""`headrace completion`: shell completion scripts."""

import click

SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print the completion script for SHELL.

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
    # click's script for fish splits at every comma and so cuts descriptions: split only at the first.
    click.echo(script.replace('(string split "," $completion)', '(string split -m 1 "," $completion)'))
