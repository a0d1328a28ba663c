"""Builds the part in C++; everything else about the distribution stands in pyproject.toml."""

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

extension = CppExtension(
    "accel_toydevice.native",
    ["csrc/device.cpp", "csrc/operators.cpp", "csrc/autocast.cpp", "csrc/module.cpp"],
    depends=["csrc/device.h"],
    extra_compile_args=["-O1", "-g0"],  # quick to build; nothing here is worth optimising
)
setup(ext_modules=[extension], cmdclass={"build_ext": BuildExtension})
