"""What Kafka lets an operator switch on for a whole cluster (KIP-584). Ours are on, and stay."""

from typing import Any

from headrace.listeners.kafka.context import KafkaContext
from headrace.listeners.kafka.errors import Code
from headrace.listeners.kafka.request_pipeline import Request

FEATURES = {"transaction.version": 2}  # KIP-890
UPGRADE, SAFE_DOWNGRADE, UNSAFE_DOWNGRADE = 1, 2, 3


async def update_features(context: KafkaContext, request: Request, fields: Any) -> dict[str, Any]:
    """All or none of them, as in Kafka; a feature may be given the level it has."""
    for one in fields.feature_updates:
        reason = why_not(one.feature, one.max_version_level, change_of(one, request.version))
        if reason is not None:
            wrong = f"Invalid update version {one.max_version_level} for feature {one.feature}. {reason}"
            return {"error_code": Code.INVALID_UPDATE_VERSION, "error_message": wrong}
    if request.version >= 2:  # answers for all at once
        return {}
    names = dict.fromkeys(one.feature for one in fields.feature_updates)
    return {"results": [{"feature": name} for name in names]}


def change_of(one: Any, version: int) -> int:
    if version == 0:
        return SAFE_DOWNGRADE if one.allow_downgrade else UPGRADE
    kind: int = one.upgrade_type
    return kind


def why_not(feature: str, level: int, change: int) -> str | None:
    have = FEATURES.get(feature)
    if change not in (UPGRADE, SAFE_DOWNGRADE, UNSAFE_DOWNGRADE):
        return f"There is no type {change} of updates."
    if have is None:
        return "There is no such feature here."
    if level < 0:
        return "A level is not less than 0."
    if level > have:
        return f"Levels up to {have} are supported."
    if level < have and change == UPGRADE:
        return f"It is at {have}, and an upgrade goes up."
    if level < have:
        return f"It stays at {have}: clients that do not know it are served without it, beside the others."
    return None
