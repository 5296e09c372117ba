"""A measured figure, and how to print it. Every benchmark returns a list of these."""

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Result:
    name: str
    value: float
    unit: str
    ratio: str = ""  # against what the machine can do, measured in the same run
    bar: str = ""  # what we want to reach
    held: bool | None = None

    def line(self) -> str:
        verdict = {True: "reached", False: "MISSED", None: ""}[self.held]
        measured = f"{self.name:<66} {number(self.value):>12} {self.unit:<14}"
        return f"{measured} {self.ratio:<34} {self.bar:<14} {verdict}".rstrip()

    def json(self) -> dict[str, object]:
        return asdict(self)


def number(value: float) -> str:
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value < 10 else f"{value:.1f}"
