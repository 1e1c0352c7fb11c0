"""What every test shares: four virtual CPU devices and a compilation cache, set before JAX is imported.

Nothing here imports JAX: the tests of the light tools must not pay for it. The cache lives in a temporary
directory of the run, so that a subprocess that compiles what a test has compiled before loads it instead.
"""

from __future__ import annotations

import os
import shutil
import tempfile

DEVICES = 4  # fsdp 2 x expert 2, the smallest mesh with both
# LLVM's optimizations cost half of every compile and are worth nothing on shapes this small.
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def pytest_configure(config):
    """Set the environment of this process and of every subprocess that a test starts."""
    config.bench_cache_dir = tempfile.mkdtemp(prefix="bench-jax-cache-")
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES} {QUICK}"
    os.environ["JAX_COMPILATION_CACHE_DIR"] = config.bench_cache_dir
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.5"


def pytest_unconfigure(config):
    """Remove the compilation cache."""
    shutil.rmtree(config.bench_cache_dir, ignore_errors=True)
