"""The root command: maps every outcome to an exit code, and every error to one sentence on stderr, not a traceback."""

import os
import select
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from headrace import errors
from headrace.cli.lazy import LazyGroup
from headrace.version import __version__

WRONG_USAGE = 2
BUG = 70
INTERRUPTED = 130

# Most specific class first. Scripts rely on the codes; docs/cli.md lists them.
EXIT_CODES: tuple[tuple[type[Exception], int, str], ...] = (
    (errors.BrokerUnreachable, 3, "the broker cannot be reached"),
    (errors.Unconfirmed, 7, "the connection was lost before the response: the messages may or may not be stored"),
    (errors.NotFound, 4, "the named object does not exist"),
    (errors.AlreadyExists, 5, "the object already exists, or the request conflicts with its state"),
    (errors.Conflict, 5, ""),
    (errors.DataFolderLocked, 8, "another process has opened the data folder"),
    (errors.StorageError, 6, "the disk failed or is full, or data is damaged"),
    (errors.CannotListen, 10, "a listener cannot bind its address: the port is in use or not permitted"),
    (errors.Overloaded, 9, "the broker is overloaded; try again later"),
    (errors.InvalidInput, 2, "invalid usage: an option, a setting or a value"),
    (errors.HeadraceError, 1, "any other error: the broker refused the request, or a file cannot be read or written"),
)

# Names chosen by others must not break a line in two or send control sequences to the terminal.
CONTROL_CHARACTERS = {code: repr(chr(code))[1:-1] for code in (*range(32), *range(127, 160))}


class _Root(LazyGroup):
    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            # The reader of stdout has exited (`headrace sub x | head`), which is no error; click would exit with 1.
            if not _is_reader_gone():
                raise
            return 0


def _is_reader_gone() -> bool:
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


root = _Root(
    name="headrace",
    commands_at={
        "serve": "headrace.cli.serve:serve",
        "standby": "headrace.cli.data_folder.standby:standby",
        "status": "headrace.cli.status:status",
        "topic": "headrace.cli.management.topic:topic",
        "pub": "headrace.cli.messages.pub:pub",
        "sub": "headrace.cli.messages.sub:sub",
        "tail": "headrace.cli.messages.tail:tail",
        "log": "headrace.cli.data_folder.log:log",
        "pipeline": "headrace.cli.pipeline:pipeline",
        "queue": "headrace.cli.management.queue:queue",
        "exchange": "headrace.cli.management.exchange:exchange",
        "binding": "headrace.cli.management.binding:binding",
        "policy": "headrace.cli.management.policy:policy",
        "vhost": "headrace.cli.management.vhost:vhost",
        "dlq": "headrace.cli.management.dlq:dlq",
        "group": "headrace.cli.management.group:group",
        "schema": "headrace.cli.management.schema:schema",
        "connection": "headrace.cli.management.connection:connection",
        "user": "headrace.cli.management.user:user",
        "definitions": "headrace.cli.management.definitions:definitions",
        "top": "headrace.cli.top:top",
        "bench": "headrace.cli.messages.bench:bench",
        "demo": "headrace.cli.demo:demo",
        "doctor": "headrace.cli.doctor:doctor",
        "completion": "headrace.cli.completion:completion",
    },
    hidden_at={
        # The spellings of rabbitmqctl and kafka-consumer-groups.
        "list_queues": "headrace.cli.management.queue:list_queues",
        "purge_queue": "headrace.cli.management.queue:purge",
        "delete_queue": "headrace.cli.management.queue:rm",
        "list_exchanges": "headrace.cli.management.exchange:ls",
        "list_bindings": "headrace.cli.management.binding:ls",
        "list_connections": "headrace.cli.management.connection:ls",
        "list_policies": "headrace.cli.management.policy:ls",
        "set_policy": "headrace.cli.management.policy:set_",
        "clear_policy": "headrace.cli.management.policy:rm",
        "list_vhosts": "headrace.cli.management.vhost:ls",
        "add_vhost": "headrace.cli.management.vhost:add",
        "delete_vhost": "headrace.cli.management.vhost:rm",
        "list_users": "headrace.cli.management.user:ls",
        "add_user": "headrace.cli.management.user:add",
        "delete_user": "headrace.cli.management.user:rm",
        "change_password": "headrace.cli.management.user:passwd",
        "set_user_tags": "headrace.cli.management.user:tags",
        "list_permissions": "headrace.cli.management.user:rights",
        "list_user_permissions": "headrace.cli.management.user:rights",
        "set_permissions": "headrace.cli.management.user:grant",
        "clear_permissions": "headrace.cli.management.user:revoke",
        "set_topic_permissions": "headrace.cli.management.user:grant_topic",
        "clear_topic_permissions": "headrace.cli.management.user:revoke_topic",
        "list_topic_permissions": "headrace.cli.management.user:rights",
        "export_definitions": "headrace.cli.management.definitions:export",
        "import_definitions": "headrace.cli.management.definitions:import_",
    },
    help="Headrace: a durable, log-structured message broker.",
    epilog="Use `headrace COMMAND --help` for more about a command. Settings: docs/configuration.md.",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
root.params.append(
    click.Option(
        ["--version"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        help="Show the version and exit.",
        callback=lambda context, _, wanted: _show_version(context) if wanted else None,
    )
)


def _show_version(context: click.Context) -> NoReturn:
    click.echo(f"headrace {__version__}")
    context.exit()


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    _replace_closed_streams()
    try:
        given = None if arguments is None else list(arguments)
        result = root.main(args=given, standalone_mode=False, complete_var="_HEADRACE_COMPLETE")
        sys.stdout.flush()
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return 0
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx is not None else "headrace"
        message = error.format_message().rstrip(".")
        return fail(f"{message[:1].lower()}{message[1:]} (see `{command} --help`)", error.exit_code)
    except click.ClickException as error:
        return fail(error.format_message(), error.exit_code)
    except BrokenPipeError:
        # Python flushes stdout at exit; what is still buffered must not go to the closed pipe again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except errors.HeadraceError as error:
        return fail(f"{error}{_advice(error)}", next(code for kind, code, _ in EXIT_CODES if isinstance(error, kind)))
    except (UnicodeEncodeError, UnicodeDecodeError) as error:  # names and JSON must be text
        return fail(f"not valid UTF-8: {str(error.object)[:80]!a}", WRONG_USAGE)
    except OSError as error:
        place = f": {error.filename}" if error.filename else ""
        return fail(f"{(error.strerror or str(error)).lower()}{place}", 1)
    except Exception as error:
        if os.environ.get("HEADRACE_TRACEBACK"):
            raise
        text = f"internal error, please report it: {type(error).__name__}: {error}"
        return fail(f"{text} (set HEADRACE_TRACEBACK=1 for a traceback)", BUG)
    return result if isinstance(result, int) else 0


def _replace_closed_streams() -> None:
    """Opens /dev/null for each standard stream that was closed with `<&-` or `>&-`.

    Otherwise a file opened later would get the descriptor of the stream, and a child process would write into it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (stays open until the process exits)


def _advice(error: errors.HeadraceError) -> str:
    if isinstance(error, errors.BrokerUnreachable):
        return " (start a broker with `headrace serve`, or set its address with --url or HEADRACE_URL)"
    return ""


def fail(sentence: str, code: int) -> int:
    click.echo(f"headrace: {sentence.translate(CONTROL_CHARACTERS)}", err=True)
    return code
