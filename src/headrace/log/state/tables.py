"""Names of the state tables that the log itself keeps. The broker names its own tables in its own modules."""

ENDS = "ends"  # log id -> where its writer stood at the last checkpoint (SavedWriter)
STARTS = "starts"  # log id -> its first offset; everything before it may be deleted
TRUNCATIONS = "truncations"  # log id -> offset that an interrupted truncation is cutting back to
DAMAGED = "damaged"  # log id -> the end that is known to have been durable before damage was found
IDS = "ids"  # NEXT_LOG_ID -> the first log id that was never reserved
NEXT_LOG_ID = b"log"
