"""The name of a device, which measurements belong to."""

import os
import platform

import torch


def hardware(device: str) -> str:
    """Return the name of the device, or the kind of CPU and its number of cores."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return f"CPU, {os.cpu_count()} cores ({platform.machine()})"
