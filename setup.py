"""The C kernels and the address of the repository; everything else is in pyproject.toml."""

import os
import platform

from setuptools import Extension, setup

FLAGS = [
    "-O3",
    "-std=gnu11",  # contracts a * b + c to fused multiply-add
    "-ffinite-math-only",
    "-fno-signed-zeros",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fopenmp-simd",
]
# One library for each kind of processor; kernels/cpu.py takes the best that the machine runs.
LEVELS = {"_cpu": []}
if platform.machine().lower() in ("x86_64", "amd64"):
    LEVELS["_cpu_avx2"] = ["-march=x86-64-v3"]
    LEVELS["_cpu_avx512"] = ["-march=x86-64-v4", "-mprefer-vector-width=512"]

# The workflow that releases names the repository: $CATNAT_REPOSITORY.
REPOSITORY = os.environ.get("CATNAT_REPOSITORY", "")
URLS = {"Repository": REPOSITORY, "Issues": f"{REPOSITORY}/issues"} if REPOSITORY else {}

setup(
    project_urls=URLS,
    ext_modules=[
        Extension(
            f"catnat.kernels.{name}",
            ["catnat/kernels/cpu.c"],
            extra_compile_args=[*FLAGS, *level],
            extra_link_args=["-pthread"],
            optional=True,  # without a compiler plain torch takes their place
        )
        for name, level in LEVELS.items()
    ],
)
