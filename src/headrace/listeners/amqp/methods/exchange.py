"""exchange.declare, delete, bind, unbind."""

from typing import Any

from pamqp import commands

from headrace.broker.routing.exchanges import is_kind
from headrace.broker.vhosts.declarations import PREDECLARED
from headrace.errors import NotFound
from headrace.listeners.amqp.access import EXCHANGE
from headrace.listeners.amqp.channel import Channel
from headrace.listeners.amqp.errors import ChannelError
from headrace.listeners.amqp.methods.queue import check_name
from headrace.wire.amqp.methods import frame
from headrace.wire.amqp.protocol import ACCESS_REFUSED, PRECONDITION_FAILED

DEFAULT_REFUSED = "operation not permitted on the default exchange"


async def declare(channel: Channel, method: commands.Exchange.Declare) -> None:
    vhost, access = channel.session.vhost, channel.session.access
    name = check_name(method.exchange)
    if method.passive:
        _check_not_default(name)
        access.look_at(EXCHANGE, name)
        vhost.routing.exchange(name)
    else:
        if not is_kind(method.exchange_type):
            # RabbitMQ before version 4 closed the connection here, with 503.
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
    _reply(channel, method, commands.Exchange.DeclareOk)


def _check_not_default(name: str) -> None:
    if not name:
        raise ChannelError(ACCESS_REFUSED, DEFAULT_REFUSED)


async def delete(channel: Channel, method: commands.Exchange.Delete) -> None:
    if method.exchange in PREDECLARED:
        where = f"'{method.exchange}' in vhost '{channel.session.vhost.name}'"
        raise ChannelError(
            ACCESS_REFUSED,
            f"deletion of system exchange {where} not allowed" if method.exchange else DEFAULT_REFUSED,
        )
    channel.session.access.configure(EXCHANGE, method.exchange)
    await channel.session.vhost.delete_exchange(method.exchange, if_unused=method.if_unused)
    _reply(channel, method, commands.Exchange.DeleteOk)


async def bind(channel: Channel, method: commands.Exchange.Bind) -> None:
    vhost = channel.session.vhost
    _check_bind(channel, method)
    destination = vhost.routing.exchange(method.destination)
    await vhost.bind(method.source, destination, method.routing_key, _arguments(method))
    _reply(channel, method, commands.Exchange.BindOk)


async def unbind(channel: Channel, method: commands.Exchange.Unbind) -> None:
    vhost = channel.session.vhost
    _check_bind(channel, method)
    try:
        destination = vhost.routing.exchange(method.destination)
        await vhost.unbind(method.source, destination, method.routing_key, _arguments(method))
    except NotFound:
        pass  # see queue.unbind
    _reply(channel, method, commands.Exchange.UnbindOk)


def _check_bind(channel: Channel, method: commands.Exchange.Bind | commands.Exchange.Unbind) -> None:
    session = channel.session
    source = session.vhost.routing.exchanges.get(method.source)
    session.access.bind(EXCHANGE, method.destination, method.source, source, method.routing_key)


def _arguments(method: Any) -> dict[str, Any]:
    found: dict[str, Any] = method.arguments
    return found


def _reply(channel: Channel, method: Any, reply: Any) -> None:
    if not method.nowait:
        channel.write(frame(channel.number, reply))
