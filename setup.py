"""The native libraries (``csrc/README.md``); everything else about the build stands in ``pyproject.toml``.

Optional: where there is no C compiler (or it fails) the package is installed without them. Then NumPy does the work of the
delta codec, and there is no KV pool.
"""

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext


class BuildLibrary(build_ext):
    """The extension is a library for ctypes, without a module in it: its name must not look like a module's."""

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ".ctypes.so"


class TagWheel(bdist_wheel):
    """Bound to the platform, which the libraries are, and to no Python: they use nothing of its ABI."""

    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform = super().get_tag()
        return "py3", "none", platform


setup(
    packages=[
        *find_packages(include=["orchestrator*", "vllm_rlplugin*", "megatron_rlplugin*"]),
        "vllm_rlplugin.patches",  # patches/vllm and patches/megatron, by package-dir of pyproject.toml
        "megatron_rlplugin.patches",
    ],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": TagWheel},
    ext_modules=[
        Extension(
            "orchestrator.transfer.delta._native",
            sources=[f"csrc/{name}.c" for name in ("level", "rans", "gather", "sparse", "planes")],
            depends=["csrc/delta.h"],
            extra_compile_args=["-std=gnu11", "-O3", "-g0", "-fvisibility=hidden"],
            optional=True,
        ),
        Extension(
            "vllm_rlplugin.kvpool.ledger._pages",
            sources=["csrc/pages.c", "csrc/vmm.c"],
            depends=["csrc/pages.h", "csrc/vmm.h"],
            define_macros=[("_GNU_SOURCE", "1")],
            extra_compile_args=["-std=gnu11", "-O2", "-g0", "-fvisibility=hidden", "-pthread"],
            extra_link_args=["-pthread", "-ldl"],
            optional=True,
        ),
    ],
)
