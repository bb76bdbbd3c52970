"""Eight simulated CPU devices, strict dtype promotion, warnings are errors (see pyproject.toml)."""

import gc
import importlib.metadata
import os

# The lowest LLVM effort halves the suite's time, most of which is compilation; what is compiled is the same program.
# jax 0.10 has an older code generator too, which compiles in a third of the time; 0.12 has not.
# Eight devices on two busy cores can keep each other waiting for longer than the 40 s after which XLA aborts.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        "--xla_backend_optimization_level=0",
        "--xla_cpu_use_fusion_emitters=false" if importlib.metadata.version("jax") < "0.11" else "",
        "--xla_cpu_collective_call_terminate_timeout_seconds=300",
    ]
).strip()
os.environ["JAX_PLATFORMS"] = "cpu"
# No persistent compilation cache: programs with collectives in conditions that jax 0.10.2 loads from it crash or hang.
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"

import jax

gc.set_threshold(200_000, 100, 1000)  # tracing makes many objects, and few cycles
jax.config.update("jax_numpy_dtype_promotion", "strict")
