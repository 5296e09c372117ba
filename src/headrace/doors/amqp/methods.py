"""Which function does which method. A function that may wait for the disk is a coroutine function."""

from collections.abc import Callable, Coroutine
from typing import Any

from pamqp import commands
from pamqp.base import Frame

from headrace.doors.amqp import basic_methods, consume_methods, exchange_methods, queue_methods, tx_methods
from headrace.wire.amqp.methods import AccessRequest

Handler = Callable[[Any, Any], Coroutine[Any, Any, None] | None]

HANDLERS: dict[type[Frame], Handler] = {
    AccessRequest: basic_methods.access,
    commands.Channel.Flow: basic_methods.flow,
    commands.Exchange.Declare: exchange_methods.declare,
    commands.Exchange.Delete: exchange_methods.delete,
    commands.Exchange.Bind: exchange_methods.bind,
    commands.Exchange.Unbind: exchange_methods.unbind,
    commands.Queue.Declare: queue_methods.declare,
    commands.Queue.Delete: queue_methods.delete,
    commands.Queue.Bind: queue_methods.bind,
    commands.Queue.Unbind: queue_methods.unbind,
    commands.Queue.Purge: queue_methods.purge,
    commands.Basic.Qos: consume_methods.qos,
    commands.Basic.Consume: consume_methods.consume,
    commands.Basic.Cancel: consume_methods.cancel,
    commands.Basic.Get: basic_methods.get,
    commands.Basic.Ack: basic_methods.ack,
    commands.Basic.Nack: basic_methods.nack,
    commands.Basic.Reject: basic_methods.reject,
    commands.Basic.Recover: basic_methods.recover,
    commands.Basic.RecoverAsync: basic_methods.recover_async,
    commands.Confirm.Select: tx_methods.confirm_select,
    commands.Tx.Select: tx_methods.select,
    commands.Tx.Commit: tx_methods.commit,
    commands.Tx.Rollback: tx_methods.rollback,
}
