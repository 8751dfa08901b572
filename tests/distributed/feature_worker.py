"""Two processes train with and without reused features, on batches unlike each other's.

Started by test_reused_features.py with a folder that holds ``runs.json`` (what to run) and
``model``. Rank 0 writes, for each run, both ranks' losses, the gradients, how often the tower ran
in every step on each rank, and the digest of the tower's weights, to ``<name>.pt`` in that folder.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import deepspeed
import torch
from deepspeed.utils import safe_get_full_grad
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from glm4v_patched.data.feature_cache import TowerFeatures, digest_weights
from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
from tests.helpers.start_deepspeed import NOTHING_STAYS_GATHERED, start_deepspeed
from tests.helpers.steps import select_weights, trainable
from tests.helpers.tiny import grown_image, pictures, text

# The picture of rank 0 and that of rank 1, step by step; "-" is a batch without one.
PICTURES = ["AB", "AB", "C-", "C-", "AD", "CD", "--", "-D", "BA"]
ZERO3 = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_allow_untested_optimizer": True,
    "gradient_clipping": 0.0,  # DeepSpeed 0.19 clips to 1.0 unless told
    "zero_optimization": {"stage": 3} | NOTHING_STAYS_GATHERED,
}


def rank_batch(step: int) -> dict[str, torch.Tensor]:
    rank = torch.distributed.get_rank()
    picture = PICTURES[step][rank]
    row = [*text(5, seed=step), *(grown_image() if picture != "-" else [])]
    row += text(9, seed=10 * step + rank + 1)
    ids = torch.tensor([row])
    images = {} if picture == "-" else {"pixel_values": pictures(1, seed=ord(picture))}
    return {"input_ids": ids, "labels": ids} | images


def load(run: dict, folder: Path):
    model = GLM4VForCausalLM.from_pretrained(folder / "model", attn_implementation="sdpa")
    model = select_weights(model, run["weights"])
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def zero3(model) -> Iterator[tuple]:
    """The model as it is called, and after each step's loss its gradients."""
    optimizer = torch.optim.SGD(trainable(model), lr=0.001)
    engine, *_ = deepspeed.initialize(model=model, config=ZERO3, optimizer=optimizer)
    for _ in PICTURES:
        loss = yield engine, None
        engine.backward(loss)
        named = list(engine.module.named_parameters())
        yield engine, {n: safe_get_full_grad(p).clone() for n, p in named if p.requires_grad}
        engine.step()
    engine.destroy()


def with_torch(model, strategy: str) -> Iterator[tuple]:
    if strategy == "fsdp2":
        for module in list(model.modules()):
            if type(module).__name__ in model._no_split_modules:
                fully_shard(module)
        wrapped = fully_shard(model)
    else:
        wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(trainable(model), lr=0.001)
    for _ in PICTURES:
        loss = yield wrapped, None
        loss.backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        if strategy == "fsdp2":
            gradients = {name: gradient.full_tensor() for name, gradient in gradients.items()}
        yield wrapped, {name: gradient.clone() for name, gradient in gradients.items()}
        optimizer.step()
        optimizer.zero_grad()


def train(run: dict, folder: Path) -> dict:
    model = load(run, folder)
    # Made before the model is sharded, as a recipe does; used after it.
    features = None
    if run["keep"] is not None:
        features = TowerFeatures(model, None if run["keep"] == "memory" else folder / run["keep"])
    tower = next(m for m in model.modules() if type(m).__name__ == "EVA2CLIPModel")
    runs = []
    tower.register_forward_hook(lambda module, inputs, output: runs.append(len(output)))
    training = zero3(model) if run["strategy"] == "zero3" else with_torch(model, run["strategy"])
    losses, gradients, counts = [], [], []
    called, _ = next(training)
    digest = digest_weights(tower)
    for step in range(len(PICTURES)):
        inputs = rank_batch(step)
        if features is not None:
            inputs = features.replace_pictures(inputs)
        output = called(**inputs)
        if features is not None:
            features.keep(output)
        _, of_step = training.send(output.loss)
        gradients.append(of_step)
        losses.append(output.loss.item())
        counts.append(len(runs))
        runs.clear()
        next(training, None)
    everyone = [None, None]
    torch.distributed.all_gather_object(everyone, (losses, counts))
    return {
        "losses": [losses for losses, _ in everyone],
        "runs": [counts for _, counts in everyone],
        "gradients": gradients,
        "digest": digest,
    }


def refusal_of_fsdp1(folder: Path) -> str:
    model = load({"weights": "frozen_vision"}, folder)
    vision = model.transformer.vision
    vision.conv = FullyShardedDataParallel(vision.conv, device_id=torch.device("cpu"))
    features = TowerFeatures(model, folder / "unused")
    # One parameter of it is left, a flat one, which is made to be trained.
    vision.requires_grad_(False)
    try:
        features.replace_pictures(rank_batch(0))
    except ValueError as error:
        return str(error)
    return "none"


def main() -> None:
    folder = Path(sys.argv[1])
    start_deepspeed()
    for run in json.loads((folder / "runs.json").read_text()):
        result = train(run, folder)
        if torch.distributed.get_rank() == 0:
            torch.save(result, folder / f"{run['name']}.pt")
    (folder / "fsdp1.txt").write_text(refusal_of_fsdp1(folder))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
