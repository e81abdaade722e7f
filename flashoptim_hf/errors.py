"""The errors that users can catch. Every message names the value, the limit and the way out."""

from __future__ import annotations


class FlashOptimError(Exception):
    """Base class of every error that this package raises on purpose."""


class ConfigurationError(FlashOptimError, ValueError):
    """An option, or a combination of options, that cannot work. Raised before training where possible."""


class UnsupportedError(FlashOptimError, RuntimeError):
    """A platform, a tensor or a mode of training that this package does not serve."""


class CheckpointError(FlashOptimError, ValueError):
    """A state that does not fit the optimizer, or a damaged file. Nothing has been changed when it is raised."""


class CheckpointWriteError(FlashOptimError, OSError):
    """A checkpoint cannot be written, for example on a full disk. Earlier checkpoints and the state in memory are as they were."""


class HostMemoryError(FlashOptimError, MemoryError):
    """Host memory for the optimizer state cannot be had."""


class OffloadError(FlashOptimError, OSError):
    """Files for the optimizer state cannot be had in `offload_dir`: the disk is full, or the folder is not there."""


class DeviceMemoryError(FlashOptimError, RuntimeError):
    """Device memory for the least that an update needs cannot be had."""
