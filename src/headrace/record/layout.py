"""The fields of a RecordBatch v2: their positions, their values and their limits. See docs/file-format.md."""

import struct
from typing import Final

# Not covered by the checksum: assigned by the broker when the batch is appended.
BASE_OFFSET_AT: Final = 0
LENGTH_AT: Final = BASE_OFFSET_AT + 8
LEADER_EPOCH_AT: Final = LENGTH_AT + 4
MAGIC_AT: Final = LEADER_EPOCH_AT + 4
CRC_AT: Final = MAGIC_AT + 1
# Covered by the checksum.
ATTRIBUTES_AT: Final = CRC_AT + 4
LAST_OFFSET_DELTA_AT: Final = ATTRIBUTES_AT + 2
BASE_TIMESTAMP_AT: Final = LAST_OFFSET_DELTA_AT + 4
MAX_TIMESTAMP_AT: Final = BASE_TIMESTAMP_AT + 8
PRODUCER_ID_AT: Final = MAX_TIMESTAMP_AT + 8
PRODUCER_EPOCH_AT: Final = PRODUCER_ID_AT + 8
BASE_SEQUENCE_AT: Final = PRODUCER_EPOCH_AT + 2
COUNT_AT: Final = BASE_SEQUENCE_AT + 4
RECORDS_AT: Final = COUNT_AT + 4

HEADER = struct.Struct(">qiibIhiqqqhii")
assert HEADER.size == RECORDS_AT

PREFIX_BYTES: Final = LEADER_EPOCH_AT  # base offset and length field, which the length field does not count
HEADER_BYTES: Final = RECORDS_AT
LENGTH_MIN: Final = HEADER_BYTES - PREFIX_BYTES
BATCH_BYTES_MAX: Final = 2**31 - 1  # the length field is an int32, as are all sizes inside
# A writer that has grown past this starts a new batch, so that one flush does not become one huge batch.
SEAL_BYTES: Final = 1 << 20

MAGIC: Final = 2
NO_TIMESTAMP: Final = -1
NO_EPOCH: Final = -1
NO_PRODUCER: Final = -1
NO_SEQUENCE: Final = -1
MAX_OFFSET: Final = 2**63 - 1
MAX_TIMESTAMP: Final = 2**63 - 1

# Attribute bits.
CODEC_MASK: Final = 0x07
LOG_APPEND_TIME_BIT: Final = 0x08
TRANSACTIONAL_BIT: Final = 0x10
CONTROL_BIT: Final = 0x20
DELETE_HORIZON_BIT: Final = 0x40

# Codec numbers.
NONE: Final = 0
GZIP: Final = 1
SNAPPY: Final = 2
LZ4: Final = 3
ZSTD: Final = 4
CODEC_NAMES: Final = {NONE: "none", GZIP: "gzip", SNAPPY: "snappy", LZ4: "lz4", ZSTD: "zstd"}
CODECS: Final = {name: number for number, name in CODEC_NAMES.items()}

CREATE_TIME: Final = 0
LOG_APPEND_TIME: Final = 1

# The type of a control record: the second int16 of its key.
CONTROL_ABORT: Final = 0
CONTROL_COMMIT: Final = 1

# Flags that select the columns of codec.columns.
WANT_OFFSET: Final = 1
WANT_TIMESTAMP: Final = 2
WANT_KEY: Final = 4
WANT_VALUE: Final = 8
WANT_HEADERS: Final = 16
WANT_TIMESTAMP_TYPE: Final = 32
WANT_ALL: Final = 63

# Default limit of the decompressed size of a batch.
DECOMPRESSED_BYTES_MAX: Final = 128 * 1024 * 1024

# Limits of the records, and of the headers of all records, in a batch from a client. A record takes seven bytes and
# a header two, or next to nothing when compressed, and some readers create a Python object for each.
RECORDS_MAX: Final = 1 << 20
HEADERS_MAX: Final = 1 << 20

# Limits of the timestamps in a batch from a client: the years 1 to 9999 in UTC. Python, Spark and the dashboard cannot
# show a date outside of them, and microseconds since 1970, as in Parquet, overflow 64 bits after the year 294,000.
TIMESTAMP_MIN: Final = -62_135_596_800_000
TIMESTAMP_MAX: Final = 253_402_300_799_999

# The reason that valid_until returns for a batch that is cut off, as opposed to one that is invalid.
INCOMPLETE: Final = "the buffer ends inside this batch"

# An AMQP message as a record: the key is the routing key, the value is the body. These two headers come first, followed
# by copies of the message's trace headers (amqp/trace_headers.pyx).
AMQP_PROPERTIES_HEADER: Final = "amqp.properties"  # property flags and list, as in the content header frame
AMQP_EXCHANGE_HEADER: Final = "amqp.exchange"
# Present if the publisher sent a header x-death: only x-death of the broker's own dead-lettering counts deaths.
AMQP_CLIENT_DEATHS_HEADER: Final = "amqp.client-deaths"
# How often the retry policy of the queue has returned the message (big-endian). A publisher may send x-retry-count.
AMQP_RETRIES_HEADER: Final = "amqp.retries"

# Headers that carry the trace of a message, at all listeners (W3C Trace Context and Baggage).
TRACEPARENT: Final = "traceparent"
TRACE_HEADERS: Final = (TRACEPARENT, "tracestate", "baggage")
