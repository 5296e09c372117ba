"""Logs that need not survive a restart: kept in memory, spilled to unsynced files when they grow.

Used by the broker for transient queues. May use everything else in log/.
"""
