"""Counters of the broker and their recent history; the HTTP listener renders them.

Every package of the broker may count here. Counters of the log are in log/counters.py.
"""
