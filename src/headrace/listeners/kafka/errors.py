"""Kafka's error codes, and the table that maps the broker's errors to them. The most specific class wins."""

from enum import IntEnum

from headrace import errors


class Code(IntEnum):
    UNKNOWN_SERVER_ERROR = -1
    NONE = 0
    OFFSET_OUT_OF_RANGE = 1
    CORRUPT_MESSAGE = 2
    UNKNOWN_TOPIC_OR_PARTITION = 3
    REQUEST_TIMED_OUT = 7
    MESSAGE_TOO_LARGE = 10
    OFFSET_METADATA_TOO_LARGE = 12
    COORDINATOR_LOAD_IN_PROGRESS = 14
    COORDINATOR_NOT_AVAILABLE = 15
    INVALID_TOPIC = 17
    INVALID_REQUIRED_ACKS = 21
    ILLEGAL_GENERATION = 22
    INCONSISTENT_GROUP_PROTOCOL = 23
    INVALID_GROUP_ID = 24
    UNKNOWN_MEMBER_ID = 25
    INVALID_SESSION_TIMEOUT = 26
    REBALANCE_IN_PROGRESS = 27
    TOPIC_AUTHORIZATION_FAILED = 29
    GROUP_AUTHORIZATION_FAILED = 30
    CLUSTER_AUTHORIZATION_FAILED = 31
    INVALID_TIMESTAMP = 32
    UNSUPPORTED_SASL_MECHANISM = 33
    ILLEGAL_SASL_STATE = 34
    UNSUPPORTED_VERSION = 35
    TOPIC_ALREADY_EXISTS = 36
    INVALID_PARTITIONS = 37
    INVALID_REPLICATION_FACTOR = 38
    INVALID_REPLICA_ASSIGNMENT = 39
    INVALID_CONFIG = 40
    INVALID_REQUEST = 42
    UNSUPPORTED_FOR_MESSAGE_FORMAT = 43
    POLICY_VIOLATION = 44
    OUT_OF_ORDER_SEQUENCE_NUMBER = 45
    DUPLICATE_SEQUENCE_NUMBER = 46
    INVALID_PRODUCER_EPOCH = 47
    INVALID_TXN_STATE = 48
    INVALID_PRODUCER_ID_MAPPING = 49
    INVALID_TRANSACTION_TIMEOUT = 50
    CONCURRENT_TRANSACTIONS = 51
    TRANSACTIONAL_ID_AUTHORIZATION_FAILED = 53
    SECURITY_DISABLED = 54
    OPERATION_NOT_ATTEMPTED = 55
    KAFKA_STORAGE_ERROR = 56
    LOG_DIR_NOT_FOUND = 57
    SASL_AUTHENTICATION_FAILED = 58
    DELEGATION_TOKEN_AUTH_DISABLED = 61
    DELEGATION_TOKEN_REQUEST_NOT_ALLOWED = 64
    NON_EMPTY_GROUP = 68
    GROUP_ID_NOT_FOUND = 69
    FETCH_SESSION_ID_NOT_FOUND = 70
    INVALID_FETCH_SESSION_EPOCH = 71
    FENCED_LEADER_EPOCH = 74
    UNKNOWN_LEADER_EPOCH = 75
    UNSUPPORTED_COMPRESSION_TYPE = 76
    MEMBER_ID_REQUIRED = 79
    GROUP_MAX_SIZE_REACHED = 81
    FENCED_INSTANCE_ID = 82
    ELECTION_NOT_NEEDED = 84
    NO_REASSIGNMENT_IN_PROGRESS = 85
    GROUP_SUBSCRIBED_TO_TOPIC = 86
    INVALID_RECORD = 87
    UNSTABLE_OFFSET_COMMIT = 88
    THROTTLING_QUOTA_EXCEEDED = 89
    PRODUCER_FENCED = 90
    RESOURCE_NOT_FOUND = 91
    DUPLICATE_RESOURCE = 92
    UNACCEPTABLE_CREDENTIAL = 93
    INVALID_UPDATE_VERSION = 95
    UNKNOWN_TOPIC_ID = 100
    BROKER_ID_NOT_REGISTERED = 102
    TRANSACTIONAL_ID_NOT_FOUND = 105
    FETCH_SESSION_TOPIC_ID_ERROR = 106
    FENCED_MEMBER_EPOCH = 110
    UNRELEASED_INSTANCE_ID = 111
    UNSUPPORTED_ASSIGNOR = 112
    STALE_MEMBER_EPOCH = 113
    UNKNOWN_SUBSCRIPTION_ID = 117
    TRANSACTION_ABORTABLE = 120
    INVALID_RECORD_STATE = 121
    SHARE_SESSION_NOT_FOUND = 122
    INVALID_SHARE_SESSION_EPOCH = 123
    INVALID_REGULAR_EXPRESSION = 128
    SHARE_SESSION_LIMIT_REACHED = 133


class UnknownTopicId(errors.StreamNotFound):
    """No topic has this id: it was deleted, or belongs to another broker."""

    def __init__(self, topic_id: bytes) -> None:
        super().__init__(topic_id.hex())


class TopicCollides(errors.InvalidInput):
    def __init__(self, name: str, other: str) -> None:
        super().__init__(f"Topic '{name}' collides with existing topic: {other}")


class NotDeleted(errors.InvalidInput):
    """DeleteRecords on a topic that is only compacted."""


class FencedLeaderEpoch(errors.InvalidInput):
    """The client knows an older leader epoch than the log's."""

    def __init__(self, epoch: int) -> None:
        super().__init__(f"leader epoch {epoch} is over")


class UnknownLeaderEpoch(errors.InvalidInput):
    """The client knows a newer leader epoch than the log's."""

    def __init__(self, epoch: int) -> None:
        super().__init__(f"leader epoch {epoch} has not begun")


class UnsupportedVersion(errors.InvalidInput):
    """A value that this version of the request does not have."""


class TopicRefused(errors.AccessRefused):
    """The user lacks the permission on the topic."""


class GroupRefused(errors.AccessRefused):
    """The user lacks the permission on the group."""


class TransactionRefused(errors.AccessRefused):
    """The user may not write to the transactional id."""


class ClusterRefused(errors.AccessRefused):
    """The request is for administrators."""


CODES: dict[type[errors.HeadraceError], Code] = {
    TopicCollides: Code.INVALID_TOPIC,
    NotDeleted: Code.POLICY_VIOLATION,
    FencedLeaderEpoch: Code.FENCED_LEADER_EPOCH,
    UnknownLeaderEpoch: Code.UNKNOWN_LEADER_EPOCH,
    UnsupportedVersion: Code.UNSUPPORTED_VERSION,
    TopicRefused: Code.TOPIC_AUTHORIZATION_FAILED,
    GroupRefused: Code.GROUP_AUTHORIZATION_FAILED,
    TransactionRefused: Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    ClusterRefused: Code.CLUSTER_AUTHORIZATION_FAILED,
    errors.UnknownMember: Code.UNKNOWN_MEMBER_ID,
    errors.IllegalGeneration: Code.ILLEGAL_GENERATION,
    errors.RebalanceInProgress: Code.REBALANCE_IN_PROGRESS,
    errors.InconsistentProtocol: Code.INCONSISTENT_GROUP_PROTOCOL,
    errors.InvalidSessionTimeout: Code.INVALID_SESSION_TIMEOUT,
    errors.InvalidGroupId: Code.INVALID_GROUP_ID,
    errors.MemberIdRequired: Code.MEMBER_ID_REQUIRED,
    errors.FencedInstance: Code.FENCED_INSTANCE_ID,
    errors.UnreleasedInstance: Code.UNRELEASED_INSTANCE_ID,
    errors.GroupFull: Code.GROUP_MAX_SIZE_REACHED,
    # A retriable code: GROUP_MAX_SIZE_REACHED would stop the client for good, but other groups used up the budget.
    errors.MembersFull: Code.COORDINATOR_NOT_AVAILABLE,
    errors.GroupNotEmpty: Code.NON_EMPTY_GROUP,
    errors.GroupNotFound: Code.GROUP_ID_NOT_FOUND,
    errors.GroupKindMismatch: Code.INCONSISTENT_GROUP_PROTOCOL,
    errors.GroupSubscribed: Code.GROUP_SUBSCRIBED_TO_TOPIC,
    errors.FencedMemberEpoch: Code.FENCED_MEMBER_EPOCH,
    errors.StaleMemberEpoch: Code.STALE_MEMBER_EPOCH,
    errors.UnsupportedAssignor: Code.UNSUPPORTED_ASSIGNOR,
    errors.InvalidPattern: Code.INVALID_REGULAR_EXPRESSION,
    errors.OffsetMetadataTooLarge: Code.OFFSET_METADATA_TOO_LARGE,
    errors.OutOfOrderSequence: Code.OUT_OF_ORDER_SEQUENCE_NUMBER,
    errors.DuplicateSequence: Code.DUPLICATE_SEQUENCE_NUMBER,
    errors.InvalidProducerEpoch: Code.INVALID_PRODUCER_EPOCH,
    errors.ProducerFenced: Code.PRODUCER_FENCED,
    errors.UnknownProducer: Code.INVALID_PRODUCER_ID_MAPPING,
    errors.InvalidTransactionState: Code.INVALID_TXN_STATE,
    errors.TransactionalIdRequired: Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    errors.InvalidTransactionTimeout: Code.INVALID_TRANSACTION_TIMEOUT,
    errors.ConcurrentTransactions: Code.CONCURRENT_TRANSACTIONS,
    errors.TransactionAbortable: Code.TRANSACTION_ABORTABLE,
    errors.TransactionNotFound: Code.TRANSACTIONAL_ID_NOT_FOUND,
    UnknownTopicId: Code.UNKNOWN_TOPIC_ID,
    errors.InvalidRecordState: Code.INVALID_RECORD_STATE,
    errors.StreamNotFound: Code.UNKNOWN_TOPIC_OR_PARTITION,
    errors.PartitionNotFound: Code.UNKNOWN_TOPIC_OR_PARTITION,
    errors.StreamExists: Code.TOPIC_ALREADY_EXISTS,
    errors.OffsetOutOfRange: Code.OFFSET_OUT_OF_RANGE,
    errors.BatchTooLarge: Code.MESSAGE_TOO_LARGE,
    errors.DecompressedTooLarge: Code.MESSAGE_TOO_LARGE,
    errors.UnknownCodec: Code.UNSUPPORTED_COMPRESSION_TYPE,
    errors.ChecksumMismatch: Code.CORRUPT_MESSAGE,
    errors.AppendTimeReserved: Code.INVALID_TIMESTAMP,
    errors.TimestampOutOfRange: Code.INVALID_TIMESTAMP,
    errors.CorruptBatch: Code.INVALID_RECORD,
    errors.LogClosed: Code.UNKNOWN_TOPIC_OR_PARTITION,
    errors.Overloaded: Code.THROTTLING_QUOTA_EXCEEDED,
    errors.DiskFull: Code.KAFKA_STORAGE_ERROR,
    errors.StorageError: Code.KAFKA_STORAGE_ERROR,
    errors.InvalidInput: Code.INVALID_REQUEST,
}


def code_of(error: errors.HeadraceError) -> Code:
    for kind in type(error).__mro__:
        code = CODES.get(kind)
        if code is not None:
            return code
    return Code.UNKNOWN_SERVER_ERROR


def group_code(code: Code) -> Code:
    """For group APIs: clients retry COORDINATOR_NOT_AVAILABLE, but do not expect a storage error."""
    return Code.COORDINATOR_NOT_AVAILABLE if code is Code.KAFKA_STORAGE_ERROR else code
