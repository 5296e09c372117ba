"""Maps every error to a problem response (RFC 9457): status, a stable code for programs, and a sentence for people.

Codes are part of the API: new ones may be added, existing ones never change.
"""

import logging
import math
from http import HTTPStatus
from typing import Annotated, Any, NotRequired, TypedDict

import msgspec
from msgspec import Meta
from starlette.responses import Response

from headrace import errors
from headrace.broker.streams.key_index import KeyNotFound
from headrace.config import InvalidSetting
from headrace.listeners.http.server.authentication import Forbidden, NotAuthorised, TooManyFailures
from headrace.wire.http.bodies import PROBLEM
from headrace.wire.http.messages import Offset, PartitionNumber

logger = logging.getLogger("headrace.http")

DISK_FULL_RETRY_S = 5
CHALLENGE = 'Basic realm="Headrace", charset="UTF-8"'

# Most specific first: the first class that matches decides.
PROBLEMS: tuple[tuple[type[Exception], int, str], ...] = (
    (NotAuthorised, 401, "not_authorised"),
    (Forbidden, 403, "forbidden"),
    (TooManyFailures, 429, "too_many_failures"),
    (errors.OffsetOutOfRange, 416, "offset_out_of_range"),
    (errors.StreamNotFound, 404, "topic_not_found"),
    (errors.PartitionNotFound, 404, "partition_not_found"),
    (errors.CursorNotFound, 404, "cursor_not_found"),
    (errors.SegmentGone, 404, "segment_gone"),
    (KeyNotFound, 404, "key_not_found"),
    (errors.NotFound, 404, "not_found"),
    (errors.StreamExists, 409, "topic_exists"),
    (errors.AlreadyExists, 409, "already_exists"),
    (errors.Conflict, 409, "conflict"),
    (errors.LimitReached, 409, "limit_reached"),
    (errors.MalformedJson, 400, "malformed_json"),
    (errors.MalformedMessage, 400, "malformed_message"),
    (errors.BodyTooLarge, 413, "body_too_large"),
    (errors.DecompressedTooLarge, 413, "body_too_large"),
    (errors.BatchTooLarge, 413, "message_too_large"),
    (errors.RecordTooLarge, 406, "too_large_to_read"),
    (errors.UnsupportedMedia, 415, "unsupported_media_type"),
    (errors.NotAcceptable, 406, "not_acceptable"),
    (errors.CrossOrigin, 403, "cross_origin"),
    (InvalidSetting, 400, "invalid_setting"),
    (errors.InvalidInput, 400, "invalid_input"),
    (errors.IndexBehind, 503, "index_behind"),
    (errors.Overloaded, 429, "overloaded"),
    (errors.DiskFull, 503, "disk_full"),
    (errors.CorruptLog, 503, "log_damaged"),
    (errors.UnreadableBatch, 503, "batch_unreadable"),
    (errors.PartlyStored, 503, "partly_stored"),
    (errors.LogClosed, 503, "stopping"),
    (errors.StorageFailed, 503, "storage_failed"),
    (errors.StorageError, 503, "storage_error"),
)
CODES = (*dict.fromkeys(code for _, _, code in PROBLEMS), "method_not_allowed", "internal_error")
# Sent by the connection before a request exists (bounded_protocol.py).
CONNECTION_CODES = (
    "headers_too_large",
    "malformed_request",
    "slow_request",
    "too_many_connections",
    "url_too_long",
)
FACTS = ("offset", "start", "end", "index", "next_offset", "size", "limit", "partitions")


class Problem(TypedDict):
    """An error (RFC 9457). Programs rely on `code`; `detail` is for people. Some codes add offsets or partitions."""

    type: str
    title: str
    status: int
    code: Annotated[str, Meta(extra_json_schema={"enum": sorted({*CODES, *CONNECTION_CODES})})]
    detail: str
    offset: NotRequired[Offset]
    start: NotRequired[Offset]
    end: NotRequired[Offset]
    index: NotRequired[Offset]
    next_offset: NotRequired[Offset]
    size: NotRequired[Offset]
    limit: NotRequired[Offset]
    partitions: NotRequired[list[PartitionNumber]]


def problem(status: int, code: str, detail: str, headers: dict[str, str] | None = None, **facts: Any) -> Response:
    body = {
        "type": "about:blank",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "code": code,
        "detail": detail,
        **facts,
    }
    return Response(msgspec.json.encode(body), status, headers, media_type=PROBLEM)


def error_response(error: Exception) -> Response:
    for kind, status, code in PROBLEMS:
        if isinstance(error, kind):
            facts = {name: value for name in FACTS if (value := getattr(error, name, None)) is not None}
            return problem(status, code, str(error), headers_of(error, status), **facts)
    # A bug in the broker: details go to its log, not to the client.
    logger.error("unexpected error while handling an HTTP request", exc_info=error)
    return problem(500, "internal_error", "internal error; the broker's log has the details")


def headers_of(error: Exception, status: int) -> dict[str, str]:
    headers = {}
    if isinstance(error, errors.Overloaded):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    elif isinstance(error, errors.DiskFull):
        headers["retry-after"] = str(DISK_FULL_RETRY_S)
    if status == 401:
        headers["www-authenticate"] = CHALLENGE
    if status == 413:
        headers["connection"] = "close"  # the rest of the body is not read
    return headers
