class PublishCounts:
    published: int
    routed: int
    returned: int
    dropped: int
    confirmed: int
    def add(self, other: PublishCounts) -> None: ...
