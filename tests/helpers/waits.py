"""Counts what waits for the device, on a CPU, too."""

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class Calls(TorchFunctionMode):
    """Counts calls that read a tensor on the host, with what they were called on."""

    NAMES = ("item", "tolist", "__bool__", "__int__", "__index__", "__float__", "cpu", "numpy")
    NAMES += ("nonzero", "unique", "masked_select", "equal")

    def __init__(self):
        super().__init__()
        self.waits = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__name__", "") in self.NAMES:
            self.waits.append(function.__name__)
        return function(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    """Counts operators; those that wait for the device apart."""

    WAITS = ("_local_scalar_dense", "nonzero", "_unique2", "masked_select", "equal", "is_nonzero")

    def __init__(self):
        super().__init__()
        self.names, self.waits = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__.split(".")[0]
        self.names.append(name)
        # An index of flags waits for their number.
        flags = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if name in self.WAITS or flags:
            self.waits.append(name)
        return function(*args, **(kwargs or {}))
