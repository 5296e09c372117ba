"""Builds the Cython kernels: every .pyx under src/ is one extension module."""

import os
import shutil
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, LinkError

HERE = Path(__file__).parent
COMPILE_ARGS = ["-O3", "-g0", "-fno-strict-aliasing"]


class BuildKernels(build_ext):
    """Stops with the name of what is missing instead of a page of compiler output."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()

    def build_extensions(self) -> None:
        compiler = (getattr(self.compiler, "compiler", None) or ["cc"])[0]
        if shutil.which(compiler) is None:
            sys.exit(
                f"headrace: no C compiler: {compiler!r} was not found. Install one "
                "(Debian: apt-get install build-essential; Fedora: dnf install gcc; macOS: xcode-select --install)."
            )
        try:
            super().build_extensions()
        except (CompileError, LinkError) as error:
            headers = Path(sysconfig.get_path("include"))
            if not (headers / "Python.h").exists():
                sys.exit(
                    f"headrace: Python's headers are missing: there is no Python.h in {headers}. Install them "
                    "(Debian: apt-get install python3-dev; Fedora: dnf install python3-devel)."
                )
            sys.exit(f"headrace: {compiler!r} could not compile a kernel: {error}")


def kernels() -> list[Extension]:
    try:
        from Cython.Build import cythonize
    except ImportError:
        sys.exit("headrace: Cython is missing: pip install 'Cython>=3.1'")
    found = [
        Extension(
            ".".join(path.relative_to("src").with_suffix("").parts),
            [str(path)],
            extra_compile_args=COMPILE_ARGS,
        )
        for path in sorted(Path("src").rglob("*.pyx"))
    ]
    return cythonize(
        found,
        include_path=["src"],
        # Elsewhere the helpers would start by importing this file again.
        nthreads=(os.cpu_count() or 1) if sys.platform == "linux" else 0,
        compiler_directives={"language_level": 3, "embedsignature": True, "freethreading_compatible": False},
    )


setup(ext_modules=kernels(), cmdclass={"build_ext": BuildKernels})
