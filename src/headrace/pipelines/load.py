"""A pipeline's file, brought in as a module that executors can be given."""

import importlib.util
import sys
import traceback
from pathlib import Path

from headrace.errors import HeadraceError, InvalidInput, NotFound
from headrace.pipelines.declare import Pipeline


def load_pipeline(path: Path) -> Pipeline:
    """The one Pipeline that the file makes. What goes wrong inside it is said with its line."""
    if not path.is_file():
        raise NotFound(f"there is no file {path}")
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
        raise InvalidInput(f"{path} cannot be loaded: {mistake(error, str(path))}") from error
    found = [value for value in vars(module).values() if isinstance(value, Pipeline)]
    if len(found) != 1:
        raise InvalidInput(f"{path} makes {len(found)} pipelines: one is needed, `pipeline = Pipeline(...)`")
    [pipeline] = found
    if not pipeline.flows:
        raise InvalidInput(f"{path} has no flow: decorate a function with @pipeline.flow(to=...)")
    # Executors cannot import the file: what it defines travels with the functions that use it.
    from pyspark import cloudpickle

    cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
    return pipeline


def mistake(error: BaseException, file: str) -> str:
    """What somebody's code in a file did wrong, and in which line of it."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    where = f" ({Path(file).name}, line {lines[-1]})" if lines else ""
    return f"{type(error).__name__}: {error}{where}"
