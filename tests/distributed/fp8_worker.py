"""Two processes train in fp8, on a CPU, sharded in every way.

Started by test_fp8.py with a folder that holds ``model``. Rank 0 writes ``fp8.pt`` there: by what
is trained and how it is sharded the losses, averaged over both ranks; under ZeRO-3 also the types
of what each process holds of the layers between two steps, and what gathers them; ``saved``, the
names and types of what is saved of a model of which parts are trained.
"""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import torch

from glm4v_patched.engine.deepspeed import gather as gathering
from glm4v_patched.engine.deepspeed.internals import shard_of
from glm4v_patched.engine.fp8 import HeldLinear
from glm4v_patched.engine.prepare import make_optimizer, prepare_model, start
from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
from tests.distributed.strategies import Training, averaged, save_on_first
from tests.helpers.fp8 import PLAIN, allow_on_cpu
from tests.helpers.start_deepspeed import start_deepspeed
from tests.helpers.tiny import grown_image, pictures, text

STEPS = 4
RATE = 0.01


def batch() -> dict[str, torch.Tensor]:
    """In every step the same."""
    seed = torch.distributed.get_rank()
    ids = torch.tensor([[*grown_image(), *text(9, seed=seed)]])
    return {"input_ids": ids, "labels": ids, "pixel_values": pictures(1, seed=seed).bfloat16()}


def with_zero(folder: Path, stage: int, trained: str, policy: str) -> dict:
    """Nothing stays gathered under stage 3, so that all is gathered twice a step."""
    live = 0.0 if policy == "full" else 1e9
    options = replace(PLAIN, zero_stage=stage, trained=trained, stage3_max_live_parameters=live)
    options = replace(options, tower=policy, language=policy)
    load = partial(GLM4VForCausalLM.from_pretrained, folder / "model", attn_implementation="sdpa")
    torch.manual_seed(3)  # adapters
    with mock.patch.object(gathering, "_Gather", side_effect=gathering._Gather) as gathers:
        engine = start(options, load, 1, RATE)
        losses = [averaged(engine.step(batch())) for _ in range(STEPS)]
        found = {"losses": losses, "gathers": gathers.call_count}
    layers = [module for module in engine.model.modules() if isinstance(module, HeldLinear)]
    found["held"] = {(shard_of(m.weight).dtype, m.weight_scale.dtype) for m in layers}
    found["bytes"] = sum(shard_of(m.weight).nbytes for m in layers)
    if stage == 3 and trained == "lm":
        state = engine.engine._zero3_consolidated_16bit_state_dict()
        found["saved"] = state and {name: tensor.dtype for name, tensor in state.items()}
    engine.engine.destroy()
    return found


def without_zero(folder: Path, way: str, trained: str) -> dict:
    """bf16 weights are themselves updated here."""
    load = partial(GLM4VForCausalLM.from_pretrained, folder / "model", attn_implementation="sdpa")
    torch.manual_seed(3)
    model = prepare_model(replace(PLAIN, trained=trained), load)
    training = Training(model, way, make_optimizer=lambda: make_optimizer(model, PLAIN, RATE))
    losses = []
    for _ in range(STEPS):
        loss = training(**batch()).loss
        training.backward(loss)
        training.update()
        losses.append(averaged(loss))
    return {"losses": losses}


if __name__ == "__main__":
    allow_on_cpu()
    start_deepspeed()
    folder = Path(sys.argv[1])
    found = {}
    for trained, policy in (("lora_all", "full"), ("lm", "selective")):
        for stage in (1, 2, 3):
            found[trained, f"zero{stage}"] = with_zero(folder, stage, trained, policy)
        for way in ("ddp", "fsdp2"):
            found[trained, way] = without_zero(folder, way, trained)
    save_on_first(found, folder / "fp8.pt")
    torch.distributed.barrier()
