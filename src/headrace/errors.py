"""Everything that can go wrong, as facts. Listeners turn these into their protocol's codes."""


class HeadraceError(Exception):
    """The root: whatever is not one of these is a bug of ours."""


# Somebody sent something wrong.


class InvalidInput(HeadraceError):
    """What was asked for makes no sense, whatever the state of the broker."""


class NotFound(HeadraceError):
    """The thing named does not exist."""


class AlreadyExists(HeadraceError):
    """The thing to be made exists already."""


class Conflict(HeadraceError):
    """What was asked for contradicts what is there."""


# record/


class CorruptBatch(InvalidInput):
    """A batch whose bytes contradict each other: length, magic, checksum, counts."""

    def __init__(self, reason: str, position: int | None = None) -> None:
        super().__init__(reason if position is None else f"batch at byte {position:,}: {reason}")
        self.reason, self.position = reason, position


class ChecksumMismatch(CorruptBatch):
    """The bytes of a batch, or of its compressed payload, do not match their checksum."""


class KeyRequired(CorruptBatch):
    """A record without a key for a compacted topic: it could never be compacted away."""


class AppendTimeReserved(CorruptBatch):
    """A client's batch claims LogAppendTime, which only the broker sets."""


class ControlBatchRefused(CorruptBatch):
    """A client sent a control batch: only the broker writes the markers of transactions."""


class InvalidProducerBatch(CorruptBatch):
    """The producer id, sequence number or transaction of a batch contradict each other or the request."""


class BatchTooLarge(InvalidInput):
    def __init__(self, size_bytes: int, size_bytes_max: int) -> None:
        super().__init__(f"a batch of {size_bytes:,} bytes is over the limit of {size_bytes_max:,}")
        self.size_bytes, self.size_bytes_max = size_bytes, size_bytes_max


class UnknownCodec(InvalidInput):
    """A compression codec we do not know."""


class DecompressedTooLarge(InvalidInput):
    """Compressed data that would unfold past the limit."""


class CorruptProperties(InvalidInput):
    """AMQP properties or a field table that cannot be read: cut short, too deep, or of an unknown type."""


# log/


class OffsetOutOfRange(InvalidInput):
    def __init__(self, offset: int, start: int, end: int) -> None:
        super().__init__(f"offset {offset} is outside {start} to {end}")
        self.offset, self.start, self.end = offset, start, end


class StorageError(HeadraceError):
    """The disk said no, or said something that cannot be true."""


class StorageFailed(StorageError):
    """A write or sync failed: nothing is confirmed any more until the data has been verified again."""


class DiskFull(StorageError):
    """No room; nothing was kept of what was refused, and appends work again once there is room."""


class CorruptLog(StorageError):
    """Bytes below the durable end that fail their checks. Nothing is cut, nothing is served past them."""

    offset: int | None = None  # in the log, of a search that met it; who reads at an offset knows that

    def __init__(self, path: str, position: int, reason: str) -> None:
        super().__init__(f"{path} is damaged at byte {position:,}: {reason}")
        self.path, self.position, self.reason = path, position, reason


class CorruptJournal(CorruptLog):
    """What was confirmed since the last checkpoint cannot all be read: a person has to decide how to go on."""

    def __init__(self, path: str, position: int, reason: str) -> None:
        super().__init__(path, position, f"{reason}; `headrace log repair` says what is left, and how to go on")
        self.found = reason


class DataFolderLocked(StorageError):
    """Another broker has this data folder open."""


class SegmentGone(NotFound):
    """The segment of a slice has been removed or rewritten: cut new slices of the same offsets."""


class LogClosed(StorageError):
    """The log is closed or was deleted."""


class Overloaded(HeadraceError):
    """Too much is waiting for the disk: try again in a moment."""

    def __init__(self, reason: str, retry_after_s: float = 1.0) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class IndexBehind(Overloaded):
    """The index of keys has not come to the end of the log yet."""


# broker/


class StreamNotFound(NotFound):
    def __init__(self, name: str, vhost: str = "/") -> None:
        super().__init__(f"there is no topic {name!r}" + ("" if vhost == "/" else f" in vhost {vhost!r}"))
        self.name, self.vhost = name, vhost


class StreamExists(AlreadyExists):
    def __init__(self, name: str, vhost: str = "/") -> None:
        super().__init__(f"topic {name!r} exists already" + ("" if vhost == "/" else f" in vhost {vhost!r}"))
        self.name, self.vhost = name, vhost


class PartitionNotFound(NotFound):
    def __init__(self, name: str, partition: int, count: int) -> None:
        super().__init__(f"topic {name!r} has no partition {partition}: it has 0 to {count - 1}")
        self.name, self.partition, self.count = name, partition, count


class PartitionNeeded(InvalidInput):
    def __init__(self, name: str, partitions: list[int]) -> None:
        named = ", ".join(map(str, partitions[:20])) + (", ..." if len(partitions) > 20 else "")
        super().__init__(f"topic {name!r} has several partitions: say which one of {named}")
        self.name, self.partitions = name, partitions


class UnreadableBatch(StorageError):
    """A stored batch that its producer compressed or built wrongly; what follows it can be read."""

    def __init__(self, name: str, partition: int, offset: int, next_offset: int, reason: str) -> None:
        super().__init__(
            f"the batch at offset {offset} of partition {partition} of topic {name!r} cannot be decoded "
            f"({reason}); the next one starts at {next_offset}"
        )
        self.offset, self.next_offset = offset, next_offset


class PartlyStored(StorageError):
    """A request too large for one journal entry failed after some of its partitions had theirs."""

    def __init__(self, failed: int, partitions: int, reason: str) -> None:
        super().__init__(
            f"{failed} of {partitions} partitions did not take their part of the request ({reason}); "
            "the others did: look before publishing again"
        )


class CursorNotFound(NotFound):
    def __init__(self, name: str) -> None:
        super().__init__(f"there is no cursor {name!r}")
        self.name = name


class CorruptCatalog(StorageError):
    """A file of the catalog that cannot be understood. Starting without it would hide a stream and its messages."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path} is damaged: {reason}")
        self.path, self.reason = path, reason


# wire/


class MalformedJson(InvalidInput):
    """Text that is not JSON, or JSON that two readers could understand differently."""


class MalformedMessage(InvalidInput):
    def __init__(self, index: int, reason: str) -> None:
        super().__init__(f"message {index}: {reason}")
        self.index, self.reason = index, reason


class BodyTooLarge(InvalidInput):
    """More than one request may carry, as sent or once unfolded."""


class UnsupportedMedia(InvalidInput):
    """A content type or content encoding nobody here understands."""


class NotAcceptable(InvalidInput):
    """The client wants the answer in a form there is not."""


class CrossOrigin(HeadraceError):
    """A page of somebody else's site tries to act with this user's reach."""


# listeners/


class CannotListen(HeadraceError):
    """A listener cannot listen where it was told to."""


# wire/


class MalformedRequest(InvalidInput):
    """Bytes that are no request of this protocol: only the connection that sent them is closed."""


# broker/: groups of consumers


class UnknownMember(NotFound):
    """A member that the group does not know: it was never there, or was removed."""


class IllegalGeneration(Conflict):
    """A member that speaks of a generation that is over."""


class RebalanceInProgress(Conflict):
    """The group is handing out its partitions anew: join again."""


class InconsistentProtocol(Conflict):
    """A member that shares no protocol with the rest of the group."""


class InvalidSessionTimeout(InvalidInput):
    """A session time-out outside what the broker allows."""


class InvalidGroupId(InvalidInput):
    """A group must have a name."""


class MemberIdRequired(HeadraceError):
    """Join again with this id, so that a lost answer leaves no member behind."""

    def __init__(self, member_id: str) -> None:
        super().__init__(f"join again as {member_id!r}")
        self.member_id = member_id


class FencedInstance(Conflict):
    """Another member has taken over this static member's name."""


class UnreleasedInstance(Conflict):
    """A static member's name that another, living member holds."""


class GroupFull(Conflict):
    """The group has as many members as are allowed."""


class MembersFull(Conflict):
    """Members of all groups together have said as much as the broker keeps."""


class GroupNotEmpty(Conflict):
    """The group has members, so it can not be deleted."""


class GroupNotFound(NotFound):
    def __init__(self, group: str) -> None:
        super().__init__(f"no group {group!r}")
        self.group = group


class GroupStaysClassic(GroupNotFound):
    """As one of the new protocol it is not there: its members can not be hosted by one."""

    def __init__(self, group: str, why: str) -> None:
        super().__init__(group)
        self.args = (f"group {group!r} stays classic: {why}",)


class GroupKindMismatch(Conflict):
    """The group exists and speaks another group protocol."""


class GroupSubscribed(Conflict):
    """Members of the group read the topic, so its offsets can not be deleted."""


class FencedMemberEpoch(Conflict):
    """A member that speaks of an epoch it does not have: it must join again."""


class StaleMemberEpoch(Conflict):
    """A commit from an epoch of the member that is over."""


class UnsupportedAssignor(InvalidInput):
    """An assignor that the broker does not have."""


class InvalidPattern(InvalidInput):
    """A regular expression for topic names that can not be read."""


class OffsetMetadataTooLarge(InvalidInput):
    """The text stored beside a committed offset is over the limit."""


# broker/: producers and transactions


class OutOfOrderSequence(Conflict):
    """A batch that does not follow the producer's last one: some are missing between."""


class DuplicateSequence(Conflict):
    """A batch older than the last five of its producer: stored long ago, its offset is forgotten."""


class InvalidProducerEpoch(Conflict):
    """A producer that a newer one of the same name has replaced."""


class ProducerFenced(Conflict):
    """A transactional producer that a newer one of the same transactional id has replaced."""


class UnknownProducer(NotFound):
    """A producer id that was never given to this transactional id."""


class InvalidTransactionState(Conflict):
    """What was asked for does not fit where the transaction is."""


class NotInTransaction(InvalidTransactionState):
    """A batch, or offsets, of a partition or group that nobody has brought into the transaction."""


class TransactionalIdRequired(InvalidInput):
    """A transactional batch in a request that names no transactional id."""


class InvalidTransactionTimeout(InvalidInput):
    """A transaction time-out outside what the broker allows."""


class ConcurrentTransactions(Conflict):
    """The transaction is being ended: try again in a moment."""


class TransactionAbortable(Conflict):
    """The transaction can only be aborted; its producer goes on with the next."""


class TransactionNotFound(NotFound):
    def __init__(self, transactional_id: str) -> None:
        super().__init__(f"no transactional id {transactional_id!r}")
        self.transactional_id = transactional_id


# client/


class BrokerUnreachable(HeadraceError):
    """Nobody answers; nothing was sent, or nothing that matters."""


class Unconfirmed(HeadraceError):
    """Sent, but the connection was lost before the answer came: stored or not, nobody can say."""


class BrokerRefused(HeadraceError):
    """What the broker answered, as it answered it: HTTP status, the stable code of the problem, one sentence."""

    def __init__(self, status: int, code: str, detail: str) -> None:
        super().__init__(detail)
        self.status, self.code, self.detail = status, code, detail


# broker/: exchanges and queues


class ExchangeNotFound(NotFound):
    def __init__(self, vhost: str, name: str) -> None:
        super().__init__(f"no exchange '{name}' in vhost '{vhost}'")
        self.vhost, self.name = vhost, name


class QueueNotFound(NotFound):
    def __init__(self, vhost: str, name: str) -> None:
        super().__init__(f"no queue '{name}' in vhost '{vhost}'")
        self.vhost, self.name = vhost, name


class VirtualHostNotFound(NotFound):
    def __init__(self, vhost: str) -> None:
        super().__init__(f"vhost '{vhost}' not found")
        self.vhost = vhost


class ArgumentMismatch(Conflict):
    """Declared again with something else than what is there, or with arguments that cannot be."""


class ResourceLocked(Conflict):
    """An exclusive queue belongs to another connection."""


class InUse(Conflict):
    """It has consumers, bindings or messages, and was to be deleted only if not; or is used exclusively."""


class ExclusiveUse(InUse):
    """A consumer has, or wants, the queue to itself."""


class AccessRefused(HeadraceError):
    """Not allowed, whoever asks or for this user."""


class LimitReached(HeadraceError):
    """One more would be over a limit: channels, bindings, consumers."""


class QueueLimitReached(Conflict):
    """In RabbitMQ's words, which its clients may look for."""

    def __init__(self, vhost: str, name: str, limit: int) -> None:
        super().__init__(f"cannot declare queue '{name}': queue limit in vhost '{vhost}' ({limit}) is reached")
        self.vhost, self.name, self.limit = vhost, name, limit


class NotSupported(HeadraceError):
    """Asked for properly, but this kind of queue does not do it."""


# broker/: share groups


class InvalidRecordState(Conflict):
    """An acknowledgement of a record that its sender does not hold."""
