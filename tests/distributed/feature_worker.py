"""Two processes train with and without reused features, on batches unlike each other's.

Started by test_reused_features.py with a folder that holds ``runs.json`` and ``model``. For each
run rank 0 writes there both ranks' losses, the gradients, how often the tower ran in every step on
each rank, and the digest of the tower's weights.
"""

import json
import sys
from pathlib import Path

import torch

from glm4v_patched.data.feature_cache import TowerFeatures, digest_weights
from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
from tests.distributed.strategies import Training, of_both_ranks, save_on_first, zero_config
from tests.helpers.start_deepspeed import start_deepspeed
from tests.helpers.steps import select_weights
from tests.helpers.tiny import grown_image, pictures, text

# The picture of rank 0 and that of rank 1, step by step; "-" is a batch without one.
PICTURES = ["AB", "AB", "C-", "C-", "AD", "CD", "--", "-D", "BA"]


def rank_batch(step: int) -> dict[str, torch.Tensor]:
    rank = torch.distributed.get_rank()
    picture = PICTURES[step][rank]
    row = [*text(5, seed=step), *(grown_image() if picture != "-" else [])]
    row += text(9, seed=10 * step + rank + 1)
    ids = torch.tensor([row])
    images = {} if picture == "-" else {"pixel_values": pictures(1, seed=ord(picture))}
    return {"input_ids": ids, "labels": ids} | images


def train(name: str, weights: str, strategy: str, keep: str | None, folder: Path) -> None:
    model = GLM4VForCausalLM.from_pretrained(folder / "model", attn_implementation="sdpa")
    model = select_weights(model, weights)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    # Made before the model is sharded, as a recipe does; used after it.
    features = keep and TowerFeatures(model, None if keep == "memory" else folder / keep)
    tower = next(m for m in model.modules() if type(m).__name__ == "EVA2CLIPModel")
    runs = []
    tower.register_forward_hook(lambda module, inputs, output: runs.append(len(output)))
    training = Training(model, strategy, zero_config())
    losses, gradients, counts = [], [], []
    digest = digest_weights(tower)
    for step in range(len(PICTURES)):
        inputs = rank_batch(step)
        output = training(**features.replace_pictures(inputs) if features else inputs)
        if features:
            features.keep(output)
        training.backward(output.loss)
        gradients.append(training.gradients())
        losses.append(output.loss.item())
        counts.append(len(runs))
        runs.clear()
        training.update()
    training.close()
    losses, counts = zip(*of_both_ranks((losses, counts)), strict=True)
    found = {"losses": losses, "runs": [*counts], "gradients": gradients, "digest": digest}
    save_on_first(found, folder / f"{name}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    start_deepspeed()
    folder = Path(sys.argv[1])
    for run in json.loads((folder / "runs.json").read_text()):
        train(*run, folder)
    torch.distributed.destroy_process_group()
