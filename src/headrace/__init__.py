"""Headrace: a durable, log-structured message broker."""

from headrace.version import __version__

__all__ = ["__version__"]
