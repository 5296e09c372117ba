"""All exceptions that Headrace raises on purpose.

An exception carries facts, not protocol codes. Each listener maps the classes to the codes of its protocol in a table
of its own, most specific class first; the command line maps them to exit codes.
"""


class HeadraceError(Exception):
    """Base class. Any other exception that reaches a user is a bug in Headrace."""


# Categories that listeners and the command line fall back to.


class InvalidInput(HeadraceError):
    """The request is invalid regardless of the broker's state."""


class NotFound(HeadraceError):
    """The named object does not exist."""


class AlreadyExists(HeadraceError):
    """The object to create already exists."""


class Conflict(HeadraceError):
    """The request contradicts the current state."""


# record/


class CorruptBatch(InvalidInput):
    """The length, magic byte, checksum or counts of a batch are inconsistent."""

    def __init__(self, reason: str, position: int | None = None) -> None:
        super().__init__(reason if position is None else f"batch at byte {position:,}: {reason}")
        self.reason, self.position = reason, position


class ChecksumMismatch(CorruptBatch):
    """The bytes of a batch, or of its compressed payload, do not match their checksum."""


class KeyRequired(CorruptBatch):
    """A record without a key for a compacted topic: it could never be compacted away."""


class AppendTimeReserved(CorruptBatch):
    """A client's batch claims LogAppendTime, which only the broker sets."""


class TimestampOutOfRange(CorruptBatch):
    """A record of a client's batch has a timestamp too far from the broker's time, or one that is no date."""

    def __init__(self, position: int, lowest: int, highest: int) -> None:
        super().__init__(
            f"the timestamp of a record is out of range: it must be within [{lowest}, {highest}]", position
        )
        self.lowest, self.highest = lowest, highest


class ControlBatchRefused(CorruptBatch):
    """A client sent a control batch: only the broker writes the markers of transactions."""


class InvalidProducerBatch(CorruptBatch):
    """The producer id, sequence number or transaction of a batch contradict each other or the request."""


class BatchTooLarge(InvalidInput):
    def __init__(self, size_bytes: int, size_bytes_max: int) -> None:
        super().__init__(f"a batch of {size_bytes:,} bytes is over the limit of {size_bytes_max:,}")
        self.size_bytes, self.size_bytes_max = size_bytes, size_bytes_max


class UnknownCodec(InvalidInput):
    """The compression codec is unknown."""


class DecompressedTooLarge(InvalidInput):
    """The data exceeds the size limit after decompression."""


class RecordTooLarge(InvalidInput):
    """A stored record is too large for the form in which a client wants to read it; `hint` names forms that work.

    `size` is what the record takes in that form or, where that is not known, at least."""

    def __init__(
        self,
        offset: int,
        size: int,
        limit: int,
        *,
        partition: int = 0,
        form: str = "",
        hint: str = "",
        next_offset: int | None = None,
    ) -> None:
        text = f"the message at offset {offset} of partition {partition} takes {size:,} bytes{form and ' '}{form}"
        super().__init__(f"{text}, and the limit is {limit:,}{hint and '. '}{hint}")
        self.offset, self.size, self.limit, self.partition, self.form = offset, size, limit, partition, form
        self.next_offset = offset + 1 if next_offset is None else next_offset

    def explained(self, *, partition: int | None = None, form: str | None = None, hint: str = "") -> "RecordTooLarge":
        """The same with more facts, known further up."""
        return RecordTooLarge(
            self.offset,
            self.size,
            self.limit,
            partition=self.partition if partition is None else partition,
            form=self.form if form is None else form,
            hint=hint,
            next_offset=self.next_offset,
        )


class CorruptProperties(InvalidInput):
    """AMQP properties or a field table are truncated, nested too deeply, or contain an unknown type."""


# log/


class OffsetOutOfRange(InvalidInput):
    def __init__(self, offset: int, start: int, end: int) -> None:
        super().__init__(f"offset {offset} is outside {start} to {end}")
        self.offset, self.start, self.end = offset, start, end


class StorageError(HeadraceError):
    """The disk failed, is full, or returned damaged data."""


class StorageFailed(StorageError):
    """A write or sync failed. Nothing is confirmed until a restart has verified the data."""


class DiskFull(StorageError):
    """The disk is full. Nothing of the refused request was stored; appends work again once there is free space."""


class CorruptLog(StorageError):
    """Bytes below the durable end fail their checks. The log is not truncated and serves nothing beyond them."""

    offset: int | None = None  # set by searches through a log; a read at an offset needs none

    def __init__(self, path: str, position: int, reason: str) -> None:
        super().__init__(f"{path} is damaged at byte {position:,}: {reason}")
        self.path, self.position, self.reason = path, position, reason


class CorruptJournal(CorruptLog):
    """Messages confirmed since the last checkpoint cannot all be read. An operator has to decide how to continue."""

    def __init__(self, path: str, position: int, reason: str) -> None:
        super().__init__(path, position, f"{reason}; run `headrace log repair` to see what is left and how to continue")
        self.found = reason


class DataFolderLocked(StorageError):
    """Another process has opened the data folder."""


class SegmentGone(NotFound):
    """The segment of a slice was deleted or rewritten. The caller must request new slices for the same offsets."""


class LogClosed(StorageError):
    """The log is closed or was deleted."""


class Overloaded(HeadraceError):
    """The broker has too much work pending. The caller should retry after `retry_after_s`."""

    def __init__(self, reason: str, retry_after_s: float = 1.0) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class IndexBehind(Overloaded):
    """The key index has not caught up with the end of the log."""


# broker/


class StreamNotFound(NotFound):
    def __init__(self, name: str, vhost: str = "/") -> None:
        super().__init__(f"topic {name!r} does not exist" + ("" if vhost == "/" else f" in vhost {vhost!r}"))
        self.name, self.vhost = name, vhost


class StreamExists(AlreadyExists):
    def __init__(self, name: str, vhost: str = "/") -> None:
        super().__init__(f"topic {name!r} already exists" + ("" if vhost == "/" else f" in vhost {vhost!r}"))
        self.name, self.vhost = name, vhost


class PartitionNotFound(NotFound):
    def __init__(self, name: str, partition: int, count: int) -> None:
        super().__init__(f"topic {name!r} has no partition {partition}; its partitions are 0 to {count - 1}")
        self.name, self.partition, self.count = name, partition, count


class PartitionNeeded(InvalidInput):
    def __init__(self, name: str, partitions: list[int]) -> None:
        named = ", ".join(map(str, partitions[:20])) + (", ..." if len(partitions) > 20 else "")
        super().__init__(f"topic {name!r} has several partitions; choose one of {named}")
        self.name, self.partitions = name, partitions


class UnreadableBatch(StorageError):
    """A stored batch cannot be decoded because its producer encoded it wrongly. The batches after it are readable."""

    def __init__(self, name: str, partition: int, offset: int, next_offset: int, reason: str) -> None:
        super().__init__(
            f"the batch at offset {offset} of partition {partition} of topic {name!r} cannot be decoded "
            f"({reason}); the next one starts at {next_offset}"
        )
        self.offset, self.next_offset = offset, next_offset


class PartlyStored(StorageError):
    """A request too large for one journal entry failed after some of its partitions had been stored."""

    def __init__(self, failed: int, partitions: int, reason: str) -> None:
        super().__init__(
            f"{failed} of the {partitions} partitions of the request were not stored ({reason}), the others were; "
            "check them before you publish again"
        )


class CursorNotFound(NotFound):
    def __init__(self, name: str) -> None:
        super().__init__(f"cursor {name!r} does not exist")
        self.name = name


class CorruptCatalog(StorageError):
    """A catalog file cannot be read. Starting without it would hide an object, such as a stream and its messages."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path} is damaged: {reason}")
        self.path, self.reason = path, reason


# wire/


class MalformedJson(InvalidInput):
    """The text is not JSON, or is JSON that parsers interpret differently, such as duplicate keys."""


class MalformedMessage(InvalidInput):
    def __init__(self, index: int, reason: str) -> None:
        super().__init__(f"message {index}: {reason}")
        self.index, self.reason = index, reason


class BodyTooLarge(InvalidInput):
    """The request body exceeds the size limit, as sent or after decompression."""


class UnsupportedMedia(InvalidInput):
    """The content type or content encoding is not supported."""


class NotAcceptable(InvalidInput):
    """The response is not available in a media type that the client accepts."""


class CrossOrigin(HeadraceError):
    """A page of another site sent the request with this user's credentials."""


class MalformedRequest(InvalidInput):
    """The bytes are not a valid request of the protocol. Only the connection that sent them is closed."""


# listeners/


class CannotListen(HeadraceError):
    """A listener cannot bind its address."""


# broker/: consumer groups


class UnknownMember(NotFound):
    """The member never joined the group, or was removed."""


class IllegalGeneration(Conflict):
    """The member's generation is not the current generation of the group."""


class RebalanceInProgress(Conflict):
    """The group is rebalancing; the member must join again."""


class InconsistentProtocol(Conflict):
    """The member supports no protocol in common with the other members of the group."""


class InvalidSessionTimeout(InvalidInput):
    """The session timeout is outside the range that the broker allows."""


class InvalidGroupId(InvalidInput):
    """The group id is empty."""


class MemberIdRequired(HeadraceError):
    """The member must join again with the id assigned here, so that a lost response leaves no member behind."""

    def __init__(self, member_id: str) -> None:
        super().__init__(f"join again with the member id {member_id!r}")
        self.member_id = member_id


class FencedInstance(Conflict):
    """Another member has taken over the group instance id of this static member."""


class UnreleasedInstance(Conflict):
    """Another live member owns this group instance id."""


class GroupFull(Conflict):
    """The group has reached its maximum number of members."""


class MembersFull(Conflict):
    """The members of all groups together have reached the broker's memory budget."""


class GroupNotEmpty(Conflict):
    """The group has members and cannot be deleted."""


class GroupNotFound(NotFound):
    def __init__(self, group: str) -> None:
        super().__init__(f"group {group!r} does not exist")
        self.group = group


class GroupStaysClassic(GroupNotFound):
    """A classic group cannot be upgraded to the consumer protocol because of its current members.

    To a client of the consumer protocol the group does not exist, hence the base class.
    """

    def __init__(self, group: str, why: str) -> None:
        super().__init__(group)
        self.args = (f"group {group!r} stays classic: {why}",)


class GroupKindMismatch(Conflict):
    """The group exists but uses another group protocol."""


class GroupSubscribed(Conflict):
    """Members of the group are subscribed to the topic, so its offsets cannot be deleted."""


class FencedMemberEpoch(Conflict):
    """The epoch that the member sent is not its epoch; it must join again."""


class StaleMemberEpoch(Conflict):
    """The commit carries an earlier epoch of the member."""


class UnsupportedAssignor(InvalidInput):
    """The broker does not have the requested assignor."""


class InvalidPattern(InvalidInput):
    """The regular expression for topic names is invalid."""


class OffsetMetadataTooLarge(InvalidInput):
    """The metadata of a committed offset exceeds the size limit."""


# broker/: producers and transactions


class OutOfOrderSequence(Conflict):
    """The sequence number of the batch leaves a gap after the producer's last batch."""


class DuplicateSequence(Conflict):
    """The batch is older than the last five of its producer: it was stored, but its offset is no longer known."""


class InvalidProducerEpoch(Conflict):
    """A producer with a newer epoch has replaced this producer."""


class ProducerFenced(Conflict):
    """A newer producer with the same transactional id has replaced this producer."""


class UnknownProducer(NotFound):
    """The producer id was never assigned to this transactional id."""


class InvalidTransactionState(Conflict):
    """The request is not allowed in the current state of the transaction."""


class NotInTransaction(InvalidTransactionState):
    """The partition or group was not added to the transaction."""


class TransactionalIdRequired(InvalidInput):
    """A transactional batch in a request that names no transactional id."""


class InvalidTransactionTimeout(InvalidInput):
    """The transaction timeout is outside the range that the broker allows."""


class ConcurrentTransactions(Conflict):
    """The previous transaction of this id is still ending; the client should retry."""


class TransactionAbortable(Conflict):
    """The transaction can only be aborted; its producer may then start the next."""


class TransactionNotFound(NotFound):
    def __init__(self, transactional_id: str) -> None:
        super().__init__(f"transactional id {transactional_id!r} does not exist")
        self.transactional_id = transactional_id


# client/


class BrokerUnreachable(HeadraceError):
    """The broker does not answer, and the request had no effect."""


class Unconfirmed(HeadraceError):
    """The connection was lost before the response arrived: the messages may or may not be stored."""


class BrokerRefused(HeadraceError):
    """The broker's error response: HTTP status, stable problem code, and detail."""

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
    """The object exists with other arguments, or the arguments are not valid for it."""


class ResourceLocked(Conflict):
    """The queue is exclusive to another connection."""


class InUse(Conflict):
    """The object has consumers, bindings or messages and was to be deleted only without, or is used exclusively."""


class ExclusiveUse(InUse):
    """A consumer has, or requests, exclusive access to the queue."""


class AccessRefused(HeadraceError):
    """The operation is forbidden, for everyone or for this user."""


class LimitReached(HeadraceError):
    """The maximum number of channels, bindings or consumers is reached."""


class QueueLimitReached(Conflict):
    """The vhost's queue limit is reached. The wording is RabbitMQ's, because clients may match on it."""

    def __init__(self, vhost: str, name: str, limit: int) -> None:
        super().__init__(f"cannot declare queue '{name}': queue limit in vhost '{vhost}' ({limit}) is reached")
        self.vhost, self.name, self.limit = vhost, name, limit


class NotSupported(HeadraceError):
    """The request is valid, but this queue type does not support it."""


# broker/: share groups


class InvalidRecordState(Conflict):
    """The record is not acquired by the member that acknowledges it."""
