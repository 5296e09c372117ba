"""A channel: its consumers, its unacked deliveries, its publisher confirms."""

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, cast

from pamqp import commands

from headrace.broker.queues.queue import Queue
from headrace.broker.queues.view import View
from headrace.broker.types.publish_tracker import PartialFlush
from headrace.errors import HeadraceError
from headrace.listeners.amqp.consumer import AmqpConsumer, Source
from headrace.listeners.amqp.errors import ChannelError
from headrace.listeners.amqp.methods.tx_state import Transaction
from headrace.wire.amqp.methods import confirm, frame
from headrace.wire.amqp.protocol import PRECONDITION_FAILED
from headrace.wire.amqp.scan import ChannelState, Runs

if TYPE_CHECKING:
    from headrace.listeners.amqp.connection import Connection


logger = logging.getLogger("headrace.amqp")


class Channel:
    def __init__(self, connection: "Connection", number: int) -> None:
        self.connection = connection
        self.number = number
        self.state = ChannelState(number)
        self.consumers: dict[str, AmqpConsumer] = {}
        self.sources: list[Source] = []
        self.prefetch = 0  # of consumers to come; see basic_methods.qos
        self.prefetch_global = 0
        self.is_flowing = True
        self.is_open = True
        self.confirms = False
        self.confirmed = 0  # the last sequence number that the publisher was told about
        self.waiting = 0  # flushes that confirms wait for
        self.refused: set[int] = set()
        self.tx: Transaction | None = None
        self.last_queue = ""
        self.reply_token: str | None = None
        self.reply_tag = ""
        self._getters: dict[View, Source] = {}
        self._ended: list[int] = []  # numbers of sources that nothing more is delivered from

    @property
    def can_deliver(self) -> bool:
        return self.is_flowing and self.is_open and self.connection.is_writable

    # Deliveries out.

    @property
    def out_to_consumers(self) -> int:
        """What the prefetch of the channel bounds: not what was asked for with basic.get."""
        tags = self.state.tags
        if not self._getters:
            return tags.unacked
        return tags.unacked - sum(tags.in_flight(source.number) for source in self._getters.values())

    def add_source(self, queue: Queue, view: View, consumer: AmqpConsumer | None) -> Source:
        """Under the number of one that nothing will come from any more, if there is one: a channel may live long, and
        have a consumer for each question that it asks."""
        tags = self.state.tags
        if self._ended:
            self.settle()  # an ack that is on its way names its number
        number = next((number for number in self._ended if not tags.in_flight(number)), None)
        if number is not None:
            self._ended.remove(number)
            source = self.sources[number] = Source(number, queue, view, consumer)
            return source
        source = Source(tags.add_source(), queue, view, consumer)
        self.sources.append(source)
        return source

    def getter(self, queue: Queue, view: View) -> Source:
        """The source of basic.get on a queue."""
        found = self._getters.get(view)
        if found is None or found.queue is not queue:
            gone = [known for known, source in self._getters.items() if source.queue.is_deleted or known is view]
            self._ended += [self._getters.pop(known).number for known in gone]
            found = self._getters[view] = self.add_source(queue, view, None)
        return found

    def settle(self) -> None:
        """Applies the acks that the scanner folded."""
        woken: set[Queue] = set()
        for number, start, end in self.state.tags.acked():
            source = self.sources[number]
            source.queue.settle(source.view, start, end)
            woken.add(source.queue)
        self._credit_came(woken)

    def _credit_came(self, woken: set[Queue]) -> None:
        if self.prefetch_global and woken:  # credit of one consumer is credit of all, and who had it last comes last
            for tag in [tag for tag, consumer in self.consumers.items() if consumer.queue in woken]:
                self.consumers[tag] = self.consumers.pop(tag)
            self.wake()
        for queue in woken:
            queue.wake()

    def take(self, tag: int, multiple: bool) -> list[tuple[Source, int, int]]:
        """What was out under the tags, as runs of offsets: a client without a prefetch has a million when it goes."""
        found = self.state.tags.take(tag, multiple)
        if found is None:
            raise ChannelError(PRECONDITION_FAILED, f"unknown delivery tag {tag}")
        runs: list[tuple[Source, int, int]] = []
        last = start = end = -1
        for number, offset in found:
            if number != last or offset != end:
                if last >= 0:
                    runs.append((self.sources[last], start, end))
                last, start = number, offset
            end = offset + 1
        if last >= 0:
            runs.append((self.sources[last], start, end))
        return runs

    def reject(self, taken: Iterable[tuple[Source, int, int]], *, requeue: bool) -> None:
        woken: set[Queue] = set()
        failed: Exception | None = None
        for source, start, end in taken:
            queue, view = source.queue, source.view
            woken.add(queue)
            if requeue and queue.gives_back_runs:
                queue.give_back_run(view, start, end)
                continue
            for offset in range(start, end):
                try:
                    (queue.give_back if requeue else queue.reject)(view, offset)
                except Exception as error:  # noqa: BLE001 - it cannot be read, say: it stays, the others have their turn
                    view.give_back(offset, offset + 1)
                    failed = failed or error
        self._credit_came(woken)
        if failed is not None:
            raise failed

    def wake(self) -> None:
        for consumer in self.consumers.values():
            consumer.queue.wake()

    # Publishes in.

    def stored(self, sequence: int) -> None:
        """Everything up to this publish is safe."""
        self.waiting -= 1
        self.confirm_to(sequence)

    def confirm_to(self, sequence: int) -> None:
        if sequence <= self.confirmed or not self.is_open:
            return
        first = self.confirmed + 1
        self.confirmed = sequence
        if self.refused:
            refused = self.refused
            self.refused = {number for number in refused if number > sequence}
            while sequence >= first and sequence in refused:  # told already, and told the opposite
                sequence -= 1
            if sequence < first:
                return
        self.connection.write(confirm(self.number, sequence, multiple=sequence > first))

    def refuse(self, sequence: int) -> None:
        """This one publish is refused, for good."""
        if self.confirms:
            self.refused.add(sequence)
            self.connection.write(confirm(self.number, sequence, multiple=False, positive=False))

    def failed(self, sequence: int, runs: Runs, error: HeadraceError) -> None:
        """Of what is not confirmed yet up to this publish nothing was stored, or only what some queues took."""
        self.waiting -= 1
        if not isinstance(error, PartialFlush):
            self._refuse_to(sequence)
            return
        for last, target in runs.ends(sequence):
            is_stored = target is not None and error.is_stored_in(cast("list[Queue]", target.owners))
            (self.confirm_to if is_stored else self._refuse_to)(last)

    def _refuse_to(self, sequence: int) -> None:
        if sequence > self.confirmed and self.is_open and self.confirms:
            self.confirmed = sequence
            self.connection.write(confirm(self.number, sequence, multiple=True, positive=False))

    def add_consumer(self, consumer: AmqpConsumer) -> None:
        self.consumers[consumer.tag] = consumer
        self.connection.listener.consumers_count += 1

    def remove_consumer(self, tag: str) -> AmqpConsumer | None:
        consumer = self.consumers.pop(tag, None)
        if consumer is not None:
            self.connection.listener.consumers_count -= 1
            self._ended += consumer.sources
        return consumer

    # Going away.

    def release(self) -> None:
        """Consumers leave their queues; what was out goes back, in its old place."""
        if not self.is_open:
            return
        self.is_open = False
        self.state.drop_content()
        self.settle()
        for tag, consumer in list(self.consumers.items()):
            self.remove_consumer(tag)
            consumer.queue.remove_consumer(consumer)
        if self.reply_token is not None:
            self.connection.listener.replies.remove(self.reply_token)
        try:
            self.reject(self.take(0, True), requeue=True)
        except Exception as error:  # other channels of the connection are to be released, too
            logger.error(
                "a message that channel %d had out is in its queue and cannot be used: %s", self.number, error,
                exc_info=error,
            )  # fmt: skip

    def send_close(self, code: int, text: str, class_id: int, method_id: int) -> None:
        """The client made a mistake: the channel ends; what it still sends is ignored until close-ok."""
        self.release()
        self.state.closing = True
        self.connection.write(
            frame(
                self.number,
                commands.Channel.Close,
                reply_code=code,
                reply_text=text,
                class_id=class_id,
                method_id=method_id,
            )
        )
