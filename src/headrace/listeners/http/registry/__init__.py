"""Confluent's schema registry API under /registry, over the broker's schema registry."""

PREFIX = "/registry"
