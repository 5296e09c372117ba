"""Users, passwords and permissions, and the regular expressions that users write.

Used by vhosts, the broker, the listeners and the command line (offline.py). May use the catalog.
"""
