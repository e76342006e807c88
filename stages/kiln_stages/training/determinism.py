"""What must be fixed before a step can be repeated bit for bit, and the record of what was fixed."""

from __future__ import annotations

import os
import platform
import resource
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
}
# Older torch releases need it for repeatable cuBLAS results; newer ones give each handle a workspace of its own.
CUBLAS_WORKSPACE = ":4096:8"
VECTOR_FLAGS = ("amx", "avx", "fma", "sse", "asimd", "sve")  # what math libraries choose their kernels by


def go_offline() -> None:
    """Keeps Hugging Face libraries off the network. Must run before transformers is first imported."""
    os.environ.update(OFFLINE)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACE)


def fix(threads: int | None = None) -> None:
    """Puts torch into the one mode in which exact resume is promised; safe to call again.

    ``threads``: intra-op threads; torch's own choice for the machine if None. Sums are split by thread, so the count is
    part of what a checkpoint is bound to. The inter-op pool stays as it is (torch can set it only once a process); no
    part of a training step runs on it, and its size is recorded too.
    """
    go_offline()
    import torch

    torch.use_deterministic_algorithms(True)  # strict: warn-only leaves fused attention on its fast, unrepeatable path
    # Strict mode fills fresh memory with NaN, so that code which reads what it never wrote shows; it repeats nothing.
    cast(Any, torch.utils.deterministic).fill_uninitialized_memory = False
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.enable_cudnn_sdp(False)  # no repeatable backward in cuDNN's attention
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.set_num_threads(threads or torch.get_num_threads())


def execution_identity(*, device: str, dtype: str, attention: str) -> dict[str, Any]:
    """Everything of the machine and the libraries that may change a bit of the result. JSON values only."""
    import torch

    identity: dict[str, Any] = {
        "attention": attention,
        "cpu": _cpu("model name"),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cpu_features": [flag for flag in sorted(_cpu("flags").split()) if flag.startswith(VECTOR_FLAGS)],
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "device": device,
        "dtype": dtype,
        "machine": platform.machine(),
        "peft": version("peft"),
        "python": platform.python_version(),
        "system": platform.system(),
        "threads_inter_op": torch.get_num_interop_threads(),
        "threads_intra_op": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "transformers": version("transformers"),
    }
    if device.startswith("cuda"):
        identity |= {
            "cublas_workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""),
            "cuda": torch.version.cuda,
            "cudnn": cast(Any, torch.backends.cudnn).version(),
            "device_capability": list(torch.cuda.get_device_capability(device)),
            "device_name": torch.cuda.get_device_name(device),
        }
    return identity


def peak_memory_mib() -> dict[str, float | None]:
    """The most memory that this process has held, in MiB: of the machine, and of the CUDA device if one was used."""
    import torch

    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB, but on macOS bytes
    mib = resident / (1 << 20 if platform.system() == "Darwin" else 1 << 10)
    used = torch.cuda.is_available() and cast(Any, torch.cuda).is_initialized()
    return {
        "peak_memory_mib": round(mib, 1),
        "peak_vram_mib": round(torch.cuda.max_memory_allocated() / (1 << 20), 1) if used else None,
    }


def _cpu(field: str) -> str:
    """A field of the first processor in /proc/cpuinfo; empty where the system has no such file or field."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == field:
            return value.strip()
    return ""
