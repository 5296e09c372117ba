"""Errors of the registry, with the codes and texts of Confluent's Schema Registry."""

from headrace.errors import HeadraceError

INVALID_SCHEMA = 42201


class RegistryError(HeadraceError):
    """`code` is the HTTP status, followed by two more digits where the status alone is ambiguous."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code

    @property
    def status(self) -> int:
        return self.code if self.code < 1000 else self.code // 100


def subject_not_found(subject: str) -> RegistryError:
    return RegistryError(40401, f"Subject '{subject}' not found.")


def version_not_found(version: object) -> RegistryError:
    return RegistryError(40402, f"Version {version} not found.")


def schema_not_found(schema_id: int | None = None) -> RegistryError:
    return RegistryError(40403, "Schema not found" if schema_id is None else f"Schema {schema_id} not found")


def subject_is_deleted(subject: str) -> RegistryError:
    text = f"Subject '{subject}' was soft deleted. Set permanent=true to delete permanently"
    return RegistryError(40404, text)


def subject_is_not_deleted(subject: str) -> RegistryError:
    return RegistryError(40405, f"Subject '{subject}' was not deleted first before being permanently deleted")


def version_is_deleted(subject: str, version: int) -> RegistryError:
    text = f"Subject '{subject}' Version {version} was soft deleted. Set permanent=true to delete permanently"
    return RegistryError(40406, text)


def version_is_not_deleted(subject: str, version: int) -> RegistryError:
    text = f"Subject '{subject}' Version {version} was not deleted first before being permanently deleted"
    return RegistryError(40407, text)


def no_level(subject: str) -> RegistryError:
    text = f"Subject '{subject}' does not have subject-level compatibility configured"
    return RegistryError(40408, text)


def no_mode(subject: str) -> RegistryError:
    return RegistryError(40409, f"Subject '{subject}' does not have subject-level mode configured")


def incompatible(subject: str, reasons: list[str]) -> RegistryError:
    text = f'Schema being registered is incompatible with an earlier schema for subject "{subject}", details: '
    return RegistryError(409, text + "; ".join(reasons[:20]))


def invalid_schema(why: str) -> RegistryError:
    return RegistryError(INVALID_SCHEMA, f"Invalid schema: {why}")


def invalid_version(version: str) -> RegistryError:
    return RegistryError(
        42202,
        f"The specified version '{version[:80]}' is not a valid version id. Allowed values are between [1, 2^31-1] "
        'and the string "latest"',
    )


def invalid_level() -> RegistryError:
    text = "Invalid compatibility level. Valid values are none, backward, forward, full, backward_transitive, "
    return RegistryError(42203, text + "forward_transitive, and full_transitive")


def invalid_mode() -> RegistryError:
    return RegistryError(42204, "Invalid mode. Valid values are READWRITE, READONLY, and IMPORT")


def not_permitted(text: str) -> RegistryError:
    return RegistryError(42205, text)


def is_referred_to(subject: str, version: int) -> RegistryError:
    text = f"One or more references exist to the schema {{subject={subject},version={version}}}."
    return RegistryError(42206, text)


def invalid_rules(why: str) -> RegistryError:
    return RegistryError(42210, f"Invalid rule set: {why}")
