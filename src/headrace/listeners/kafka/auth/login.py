"""The SASL requests: handshake, authenticate, and the raw tokens of clients before Kafka 1.0.

None of them is async: requests that follow on the connection must find the login done.
"""

import logging
from typing import Any

from headrace.broker.access import scram_keys
from headrace.errors import MalformedRequest
from headrace.listeners.common.addresses import FAILURE_DELAY_S
from headrace.listeners.kafka.auth.gate import GatedConnection, LoginStage
from headrace.listeners.kafka.auth.mechanism import PLAIN, LoginRefused
from headrace.listeners.kafka.connection import TOKEN_BYTES_MAX, Connection
from headrace.listeners.kafka.context import KafkaContext
from headrace.listeners.kafka.errors import Code
from headrace.listeners.kafka.request_pipeline import Request
from headrace.wire.kafka.codec import decode
from headrace.wire.kafka.schema import request_struct

logger = logging.getLogger("headrace.kafka")

MECHANISMS = [PLAIN, *scram_keys.HASHES]


def sasl_handshake(context: KafkaContext, request: Request) -> None:
    fields = _fields(request)
    connection = request.connection
    if fields.mechanism not in MECHANISMS:
        _count_refused(context, connection, f"unknown mechanism {fields.mechanism!r:.40}")
        connection.end()
        request.reply({"error_code": Code.UNSUPPORTED_SASL_MECHANISM, "mechanisms": MECHANISMS})
        return
    connection.exchange = context.gate.exchange(fields.mechanism)
    connection.login = LoginStage.RAW_TOKEN if request.version == 0 else LoginStage.TOKEN
    request.reply({"mechanisms": MECHANISMS})


def sasl_authenticate(context: KafkaContext, request: Request) -> None:
    fields = _fields(request)
    connection = request.connection
    stage, connection.login = connection.login, LoginStage.NONE
    if stage is not LoginStage.TOKEN:
        text = "SaslAuthenticate request received without a SaslHandshake"
        _count_refused(context, connection, text)
        connection.end()
        request.reply({"error_code": Code.ILLEGAL_SASL_STATE, "error_message": text})
        return
    try:
        answer, is_done = context.gate.log_in(fields.auth_bytes, connection)
    except LoginRefused as error:
        _count_refused(context, connection, error.why)
        connection.end()
        refused = {"error_code": Code.SASL_AUTHENTICATION_FAILED, "error_message": str(error)}
        context.loop.call_later(FAILURE_DELAY_S, request.reply, refused)
        return
    if is_done:
        connection.logged_in()
    else:
        connection.login = LoginStage.TOKEN
    request.reply({"auth_bytes": answer})


def take_raw_token(context: KafkaContext, connection: Connection, token: bytes) -> None:
    """After version 0 of the handshake, client and broker exchange bare tokens instead of requests and responses."""
    connection.login = LoginStage.NONE
    if len(token) > TOKEN_BYTES_MAX:
        raise MalformedRequest(f"a token of {len(token):,} bytes")
    try:
        answer, is_done = context.gate.log_in(token, connection)
    except LoginRefused as error:
        _count_refused(context, connection, error.why)
        connection.end()
        context.loop.call_later(FAILURE_DELAY_S, connection.abort, error)
        return
    if is_done:
        connection.logged_in()
    else:
        connection.login = LoginStage.RAW_TOKEN
    connection.send_token(answer)


def _fields(request: Request) -> Any:
    if request.size > TOKEN_BYTES_MAX:
        raise MalformedRequest(f"{request.api.name} of {request.size:,} bytes")
    return decode(request_struct(request.api, request.version), request.body, request.position)


def _count_refused(context: KafkaContext, connection: GatedConnection, why: str) -> None:
    context.stats.count("logins_refused")
    logger.warning("login refused from %s: %s", connection.peer, why)
