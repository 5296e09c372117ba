"""Memory and disk pressure: slows or pauses publishers and reclaims memory.

Listeners ask `Pressure` before they accept data, and register what can be reclaimed. It uses log/ and the limits of the
process.
"""
