"""One thread: the tensors are tiny, and the order of sums must not depend on the machine."""

import torch

torch.set_num_threads(1)
