"""HeadraceSource: the data source that Spark instantiates on the driver for every load and save."""

from collections.abc import MutableMapping
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

from headrace.spark import options as parsing
from headrace.spark.schema import check_schema, columns_of, ddl

if TYPE_CHECKING:
    from pyspark.sql.datasource import (
        DataSourceReader,
        DataSourceStreamReader,
        DataSourceStreamWriter,
        DataSourceWriter,
    )
    from pyspark.sql.types import StructType

    from headrace.spark.access import Access


class HeadraceSource(DataSource):
    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        parsing.check_names(options)

    @classmethod
    def name(cls) -> str:
        return "headrace"

    def schema(self) -> str:
        """Called by Spark for a load without a schema. Reports wrong options at once, before the query starts."""
        chosen = parsing.read_options(self.options)
        columns = columns_of(chosen.columns, chosen.include_headers)
        from headrace.spark.plan import Planner

        access = open_access(chosen)
        Planner(chosen, access).topics()
        access.warn_if_unprotected()
        return ddl(columns)

    def reader(self, schema: "StructType") -> "DataSourceReader":
        from headrace.spark.reader import BatchReader

        chosen = parsing.read_options(self.options)
        return BatchReader(chosen, open_access(chosen), check_schema(schema), schema)

    def streamReader(self, schema: "StructType") -> "DataSourceStreamReader":  # noqa: N802
        from headrace.spark.reader import StreamReader

        chosen = parsing.read_options(self.options)
        return StreamReader(chosen, open_access(chosen), check_schema(schema), schema)

    def writer(self, schema: "StructType", overwrite: bool) -> "DataSourceWriter":
        from headrace.spark.writer import BatchWriter, check_columns

        chosen = parsing.write_options(self.options)
        if overwrite:
            raise parsing.BadOption("mode", "must be append: records can only be added to a topic")
        check_columns(schema, chosen.topic)
        return BatchWriter(chosen, schema.fieldNames())

    def streamWriter(self, schema: "StructType", overwrite: bool) -> "DataSourceStreamWriter":  # noqa: N802
        from headrace.spark.writer import StreamWriter, check_columns

        chosen = parsing.write_options(self.options)
        check_columns(schema, chosen.topic)
        return StreamWriter(chosen, schema.fieldNames())


def open_access(chosen: parsing.ReadOptions) -> "Access":
    """FolderAccess with the option path, BrokerAccess otherwise."""
    committed = chosen.isolation == "read_committed"
    if chosen.path is not None:
        from headrace.spark.folder_access import FolderAccess

        return FolderAccess(
            chosen.path,
            committed=committed,
            fail_on_data_loss=chosen.fail_on_data_loss,
            bootstrap=chosen.bootstrap,
        )
    from headrace.spark.broker_access import BrokerAccess

    assert chosen.bootstrap is not None
    return BrokerAccess(chosen.bootstrap, committed=committed, fail_on_data_loss=chosen.fail_on_data_loss)
