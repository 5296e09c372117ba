"""Loads the Python file of a pipeline as a module whose functions can be sent to executors."""

import importlib.util
import sys
import traceback
from pathlib import Path

from headrace.errors import HeadraceError, InvalidInput, NotFound
from headrace.pipelines.declare import Pipeline


def load_pipeline(path: Path) -> Pipeline:
    """The Pipeline that the file creates. Errors inside the file are reported with their line."""
    if not path.is_file():
        raise NotFound(f"file {path} does not exist")
    name = "headrace_pipeline_" + "".join(c if c.isalnum() else "_" for c in path.stem)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InvalidInput(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except HeadraceError:
        raise
    except Exception as error:
        raise InvalidInput(f"{path} cannot be loaded: {describe_error(error, str(path))}") from error
    found = [value for value in vars(module).values() if isinstance(value, Pipeline)]
    if len(found) != 1:
        raise InvalidInput(f"{path} must create one pipeline with `pipeline = Pipeline(...)`, but creates {len(found)}")
    [pipeline] = found
    if not pipeline.flows:
        raise InvalidInput(f"{path} has no flows: decorate a function with @pipeline.flow(to=...)")
    # Executors cannot import the file: pickle its definitions by value, together with the functions that use them.
    from pyspark import cloudpickle

    cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
    return pipeline


def describe_error(error: BaseException, file: str) -> str:
    """An error raised by the user's file, with the line in that file."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    where = f" ({Path(file).name}, line {lines[-1]})" if lines else ""
    return f"{type(error).__name__}: {error}{where}"
