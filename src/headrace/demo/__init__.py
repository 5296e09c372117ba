"""A small shop that keeps every door busy, so that a newcomer sees messages flow before writing any code."""
