"""What a connection and its channels have sent and received. Counted per read, write and batch, never per message."""

from dataclasses import dataclass

from headrace.publish_counts import PublishCounts


@dataclass(slots=True)
class SocketCounts:
    received_bytes: int = 0
    reads: int = 0
    sent_bytes: int = 0
    writes: int = 0


@dataclass(slots=True)
class ChannelCounts:
    """Publishes are counted by the scanner, see ChannelState.messages and dropped."""

    deliver: int = 0
    deliver_no_ack: int = 0
    get: int = 0
    get_no_ack: int = 0
    get_empty: int = 0
    redeliver: int = 0
    ack: int = 0
    confirm: int = 0
    returned: int = 0
    dropped: int = 0  # by Python; the scanner counts its own

    def unroutable(self, exchange: PublishCounts, *, is_returned: bool) -> None:
        if is_returned:
            self.returned += 1
            exchange.returned += 1
        else:
            self.dropped += 1
            exchange.dropped += 1
