"""Builds the part in C++; everything else about the distribution stands in pyproject.toml."""

from glob import glob

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

NAMES = (
    "autocast",
    "collectives",
    "communicator",
    "device",
    "guard",
    "launch",
    "memory",
    "module",
    "operators",
    "queue",
    "random",
)

extension = CppExtension(
    "accel_toydevice.native",
    [f"csrc/{name}.cpp" for name in NAMES],
    depends=sorted(glob("csrc/*.h")),
    extra_compile_args=["-std=c++20", "-O1", "-g0"],  # quick to build; nothing here is worth optimising
)
setup(ext_modules=[extension], cmdclass={"build_ext": BuildExtension})
