"""Commands that publish and read messages through headrace.client: pub, sub, tail and bench."""
