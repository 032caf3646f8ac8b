"""How much memory a worker's CUDA device has free, and how much of it this process holds."""

from __future__ import annotations

import os

import torch


def free_memory() -> int:
    """Free bytes of this worker's device, when what it was told to do is done. Others on the device count too."""
    torch.accelerator.synchronize()
    return int(torch.accelerator.get_memory_info()[0])


def process_memory() -> int | None:
    """Bytes of the device that this process holds, its context and what libraries took included, by NVML. None: NVML cannot say,
    as in a container that sees other process numbers than the driver."""
    if not torch.cuda.is_available():
        return None
    from vllm.third_party import pynvml

    try:
        pynvml.nvmlInit()
        uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
        device = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        alone = pynvml.nvmlDeviceGetComputeRunningProcesses(device)
        rows = [*alone, *pynvml.nvmlDeviceGetMPSComputeRunningProcesses(device)]
    except pynvml.NVMLError:
        return None
    return next((int(row.usedGpuMemory) for row in rows if row.pid == os.getpid() and row.usedGpuMemory), None)
