"""Builds the CPU kernels. Everything else is in pyproject.toml.

They are plain C behind ctypes, so one build serves every Python and torch. Without a compiler the engine installs
all the same and computes with torch instead.
"""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "lockstep_engine.kernels._cpu",
            ["src/lockstep_engine/kernels/cpu.c"],
            depends=["src/lockstep_engine/kernels/cpu_loops.h", "src/lockstep_engine/kernels/cpu_integers.h"],
            # Lines for backtraces. Python's own flags ask for all that debuggers use, which takes a third of the time.
            extra_compile_args=["-g1", "-O3", "-fopenmp", "-fno-math-errno", "-ffp-contract=off", "-Wno-psabi"],
            libraries=["m"],
            optional=True,
        )
    ]
)
