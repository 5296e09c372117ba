"""Broker-wide limits for groups; docs/kafka.md has Kafka's names for them."""

import msgspec

from headrace.errors import InvalidSessionTimeout


class GroupSettings(msgspec.Struct, frozen=True, kw_only=True):
    session_timeout_ms_min: int = 1_000
    session_timeout_ms_max: int = 30 * 60 * 1000
    initial_rebalance_delay_ms: int = (
        0  # Kafka waits 3 s for more members; starting at once is friendlier to single consumers
    )
    members_max: int = 10_000
    members_bytes_max: int = 64 << 20  # of all groups together, see member_budget.py
    offset_metadata_bytes_max: int = 4096
    offsets_retention_ms: int = 7 * 24 * 3600 * 1000  # for groups without members
    migration_policy: str = "bidirectional"  # or upgrade (to the consumer protocol), downgrade, disabled

    @property
    def can_upgrade(self) -> bool:
        return self.migration_policy in ("bidirectional", "upgrade")

    @property
    def can_downgrade(self) -> bool:
        return self.migration_policy in ("bidirectional", "downgrade")

    def check_session_timeout(self, timeout_ms: int) -> None:
        if not self.session_timeout_ms_min <= timeout_ms <= self.session_timeout_ms_max:
            raise InvalidSessionTimeout(f"{timeout_ms} ms")
