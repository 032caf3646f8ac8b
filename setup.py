"""The native library of ``orchestrator.transfer.delta``; everything else about the build stands in ``pyproject.toml``.

Optional: where there is no C compiler (or it fails) the package is installed without it and NumPy does the work.
"""

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


class BuildLibrary(build_ext):
    """The extension is a library for ctypes, without a module in it: its name must not look like a module's."""

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ".ctypes.so"


setup(
    cmdclass={"build_ext": BuildLibrary},
    ext_modules=[
        Extension(
            "orchestrator.transfer.delta._native",
            sources=[f"csrc/{name}.c" for name in ("level", "rans", "gather", "sparse", "planes")],
            depends=["csrc/delta.h"],
            extra_compile_args=["-std=gnu11", "-O3", "-fvisibility=hidden"],
            optional=True,
        )
    ],
)
