"""confirm.select, tx.select, commit, rollback."""

from pamqp import commands

from headrace.errors import HeadraceError
from headrace.listeners.amqp import publish
from headrace.listeners.amqp.channel import Channel
from headrace.listeners.amqp.confirms import ChannelConfirms
from headrace.listeners.amqp.errors import ChannelError
from headrace.listeners.amqp.methods import basic
from headrace.listeners.amqp.transaction import Transaction
from headrace.wire.amqp.methods import frame
from headrace.wire.amqp.protocol import PRECONDITION_FAILED


def confirm_select(channel: Channel, method: commands.Confirm.Select) -> None:
    if channel.tx is not None:
        raise ChannelError(PRECONDITION_FAILED, "cannot switch from tx to confirm mode")
    if channel.confirms is None:
        channel.connection.after_feed()
        vhost_counts = channel.session.vhost.routing.counts
        channel.confirms = ChannelConfirms(channel.number, channel.write, channel.counts, vhost_counts)
        channel.state.confirms = True
        channel.state.sequence = 0  # the first publish after this has number 1
    if not method.nowait:
        channel.write(frame(channel.number, commands.Confirm.SelectOk))


def select(channel: Channel, method: commands.Tx.Select) -> None:
    if channel.confirms is not None:
        raise ChannelError(PRECONDITION_FAILED, "cannot switch from confirm to tx mode")
    if channel.tx is None:
        channel.tx = Transaction()
        channel.state.tx = True
        channel.state.fast_acks = False
    channel.write(frame(channel.number, commands.Tx.SelectOk))


def _transaction(channel: Channel) -> Transaction:
    if channel.tx is None:
        raise ChannelError(PRECONDITION_FAILED, "channel is not transactional")
    return channel.tx


async def commit(channel: Channel, method: commands.Tx.Commit) -> None:
    """Writes the transaction as one atomic group: after a crash either all of it is stored or nothing."""
    tx = _transaction(channel)
    flushes = channel.context.flushes
    try:
        for held in tx.publishes:
            publish.check(channel, *held)
    except HeadraceError:
        tx.clear()
        raise
    is_whole = True
    flushes.begin_atomic()
    try:
        with flushes.collecting() as batches:
            for held in tx.publishes:
                is_whole = publish.route_message(channel, *held) and is_whole
            for settle in tx.settles:
                basic.apply(channel, settle)
    finally:
        flushes.end_atomic()
        tx.clear()
    await flushes.wait_stored(batches)
    if not is_whole:  # a full queue refused a message; the text is RabbitMQ's
        raise ChannelError(PRECONDITION_FAILED, "partial tx completion")
    channel.write(frame(channel.number, commands.Tx.CommitOk))


def rollback(channel: Channel, method: commands.Tx.Rollback) -> None:
    """Drops publishes and acks. Messages acked in the transaction are unacknowledged again, but not requeued."""
    _transaction(channel).clear()
    channel.write(frame(channel.number, commands.Tx.RollbackOk))
