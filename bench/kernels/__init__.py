"""Cython that only benchmarks and tests need: compiled when it is asked for, never part of the package."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent.parent


def load(name: str) -> ModuleType:
    """The module bench/kernels/<name>.pyx, built into build/kernels unless it is there already."""
    from Cython.Build import cythonize
    from setuptools import Distribution, Extension

    source = Path(__file__).with_name(f"{name}.pyx")
    folder = ROOT / "build" / "kernels"
    module = f"bench_kernel_{name}"
    extension = Extension(module, [str(source)], extra_compile_args=["-O3", "-fno-strict-aliasing"])
    built = cythonize(
        [extension],
        include_path=[str(ROOT / "src")],
        build_dir=str(folder),
        compiler_directives={"language_level": 3},
        quiet=True,
    )
    distribution = Distribution({"name": module, "ext_modules": built})
    command = distribution.get_command_obj("build_ext")
    command.build_lib, command.build_temp = str(folder), str(folder)
    command.ensure_finalized()
    command.run()
    spec = importlib.util.spec_from_file_location(module, command.get_ext_fullpath(module))
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[module] = loaded
    spec.loader.exec_module(loaded)
    return loaded
