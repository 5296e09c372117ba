"""The handler of each AMQP method. Handlers that may wait for the disk are coroutine functions."""

from collections.abc import Callable, Coroutine
from typing import Any

from pamqp import commands
from pamqp.base import Frame

from headrace.listeners.amqp.channel import Channel
from headrace.listeners.amqp.methods import basic, consume, exchange, queue, tx
from headrace.wire.amqp.methods import AccessRequest

Handler = Callable[[Channel, Any], Coroutine[Any, Any, None] | None]

HANDLERS: dict[type[Frame], Handler] = {
    AccessRequest: basic.access,
    commands.Channel.Flow: basic.flow,
    commands.Exchange.Declare: exchange.declare,
    commands.Exchange.Delete: exchange.delete,
    commands.Exchange.Bind: exchange.bind,
    commands.Exchange.Unbind: exchange.unbind,
    commands.Queue.Declare: queue.declare,
    commands.Queue.Delete: queue.delete,
    commands.Queue.Bind: queue.bind,
    commands.Queue.Unbind: queue.unbind,
    commands.Queue.Purge: queue.purge,
    commands.Basic.Qos: consume.qos,
    commands.Basic.Consume: consume.consume,
    commands.Basic.Cancel: consume.cancel,
    commands.Basic.Get: basic.get,
    commands.Basic.Ack: basic.ack,
    commands.Basic.Nack: basic.nack,
    commands.Basic.Reject: basic.reject,
    commands.Basic.Recover: basic.recover,
    commands.Basic.RecoverAsync: basic.recover_async,
    commands.Confirm.Select: tx.confirm_select,
    commands.Tx.Select: tx.select,
    commands.Tx.Commit: tx.commit,
    commands.Tx.Rollback: tx.rollback,
}
