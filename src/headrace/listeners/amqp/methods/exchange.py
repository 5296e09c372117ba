"""exchange.declare, delete, bind, unbind."""

from typing import TYPE_CHECKING, Any

from pamqp import commands

from headrace.broker.routing.exchanges import is_kind
from headrace.broker.vhosts.declarations import PREDECLARED
from headrace.errors import NotFound
from headrace.listeners.amqp.access import EXCHANGE
from headrace.listeners.amqp.errors import ChannelError
from headrace.listeners.amqp.methods.names import check_name
from headrace.wire.amqp.methods import frame
from headrace.wire.amqp.protocol import ACCESS_REFUSED, PRECONDITION_FAILED

if TYPE_CHECKING:
    from headrace.listeners.amqp.channel import Channel

DEFAULT_REFUSED = "operation not permitted on the default exchange"


async def declare(channel: "Channel", method: commands.Exchange.Declare) -> None:
    vhost, access = channel.connection.vhost, channel.connection.access
    name = check_name(method.exchange)
    if method.passive:
        _check_not_default(name)
        access.look_at(EXCHANGE, name)
        vhost.routing.exchange(name)
    else:
        if not is_kind(method.exchange_type):
            # RabbitMQ before 4 ended the whole connection here, with 503.
            raise ChannelError(PRECONDITION_FAILED, f"unknown exchange type '{method.exchange_type[:60]}'")
        _check_not_default(name)
        access.configure(EXCHANGE, name)
        alternate = _arguments(method).get("alternate-exchange")
        if isinstance(alternate, str) and name not in vhost.routing.exchanges:
            access.read(EXCHANGE, name)
            access.write(EXCHANGE, alternate)
        await vhost.declare_exchange(
            name,
            method.exchange_type,
            durable=method.durable,
            auto_delete=method.auto_delete,
            internal=method.internal,
            arguments=_arguments(method),
        )
    _answer(channel, method, commands.Exchange.DeclareOk)


def _check_not_default(name: str) -> None:
    if not name:
        raise ChannelError(ACCESS_REFUSED, DEFAULT_REFUSED)


async def delete(channel: "Channel", method: commands.Exchange.Delete) -> None:
    if method.exchange in PREDECLARED:
        where = f"'{method.exchange}' in vhost '{channel.connection.vhost.name}'"
        raise ChannelError(
            ACCESS_REFUSED,
            f"deletion of system exchange {where} not allowed" if method.exchange else DEFAULT_REFUSED,
        )
    channel.connection.access.configure(EXCHANGE, method.exchange)
    await channel.connection.vhost.delete_exchange(method.exchange, if_unused=method.if_unused)
    _answer(channel, method, commands.Exchange.DeleteOk)


async def bind(channel: "Channel", method: commands.Exchange.Bind) -> None:
    vhost = channel.connection.vhost
    _check_bind(channel, method)
    destination = vhost.routing.exchange(method.destination)
    await vhost.bind(method.source, destination, method.routing_key, _arguments(method))
    _answer(channel, method, commands.Exchange.BindOk)


async def unbind(channel: "Channel", method: commands.Exchange.Unbind) -> None:
    vhost = channel.connection.vhost
    _check_bind(channel, method)
    try:
        destination = vhost.routing.exchange(method.destination)
        await vhost.unbind(method.source, destination, method.routing_key, _arguments(method))
    except NotFound:
        pass  # see queue_methods.unbind
    _answer(channel, method, commands.Exchange.UnbindOk)


def _check_bind(channel: "Channel", method: commands.Exchange.Bind | commands.Exchange.Unbind) -> None:
    connection = channel.connection
    source = connection.vhost.routing.exchanges.get(method.source)
    connection.access.bind(EXCHANGE, method.destination, method.source, source, method.routing_key)


def _arguments(method: Any) -> dict[str, Any]:
    found: dict[str, Any] = method.arguments
    return found


def _answer(channel: "Channel", method: Any, answer: Any) -> None:
    if not method.nowait:
        channel.connection.write(frame(channel.number, answer))
