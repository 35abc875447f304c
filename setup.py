"""The C kernels; everything else is in pyproject.toml."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "catnat.ops._native",
            ["catnat/ops/_native.c"],
            extra_compile_args=[
                "-O3",
                "-std=gnu11",  # contracts a * b + c to fused multiply-add
                "-ffinite-math-only",
                "-fno-signed-zeros",
                "-fno-math-errno",
                "-fno-trapping-math",
                "-fopenmp-simd",
            ],
            extra_link_args=["-pthread"],
            optional=True,  # without a compiler plain torch takes their place
        )
    ]
)
