"""A small shop that keeps every listener busy, so that a newcomer sees messages flow before writing any code."""
