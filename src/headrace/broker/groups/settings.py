"""Limits of groups; Kafka's names for them are in docs/kafka.md."""

import msgspec


class GroupSettings(msgspec.Struct, frozen=True, kw_only=True):
    session_timeout_ms_min: int = 1_000
    session_timeout_ms_max: int = 30 * 60 * 1000
    initial_rebalance_delay_ms: int = 0  # Kafka waits 3 s for more members; we would rather start
    members_max: int = 10_000
    members_bytes_max: int = 64 << 20  # of all groups, see room.py
    offset_metadata_bytes_max: int = 4096
    offsets_retention_ms: int = 7 * 24 * 3600 * 1000  # of a group without members
    migration_policy: str = "bidirectional"  # or upgrade (to the new protocol), downgrade, disabled

    @property
    def can_upgrade(self) -> bool:
        return self.migration_policy in ("bidirectional", "upgrade")

    @property
    def can_downgrade(self) -> bool:
        return self.migration_policy in ("bidirectional", "downgrade")
