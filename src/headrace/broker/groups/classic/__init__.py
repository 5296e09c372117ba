"""The classic group protocol: members elect a leader, and the leader assigns partitions (JoinGroup, SyncGroup).

Used by `groups.coordinator` and by `groups.consumer`, which hosts classic members during a migration.
"""
