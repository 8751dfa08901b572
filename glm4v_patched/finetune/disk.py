"""How much disk a run needs: what it saves at the end, and its checkpoints. Needs no torch."""

import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..engine.folders import nearest
from ..engine.options import (
    LANGUAGE_TARGETS,
    TOWER_TARGETS,
    is_lora,
    part_of,
    parts_trained,
)
from ..models.check_weights import shapes_of
from ..terminal_text import in_bytes
from .recipe_trainer import save_strategy

SAVING = ("save_strategy", "save_steps")
FP32, MOMENTS, MOMENTS_OF_8_BITS = 4, 8, 2
# Whose sizes are known before it is downloaded.
PUBLISHED = ("zai-org/glm-4v-9b", "THUDM/glm-4v-9b")
_LANGUAGE, _TOWER = "transformer.encoder.layers", "transformer.vision.transformer.layers"
PUBLISHED_SHAPES = {
    **{f"{_LANGUAGE}.{n}.self_attention.query_key_value.weight": [4608, 4096] for n in range(40)},
    **{f"{_LANGUAGE}.{n}.self_attention.dense.weight": [4096, 4096] for n in range(40)},
    **{f"{_LANGUAGE}.{n}.mlp.dense_h_to_4h.weight": [27392, 4096] for n in range(40)},
    **{f"{_LANGUAGE}.{n}.mlp.dense_4h_to_h.weight": [4096, 13696] for n in range(40)},
    **{f"{_TOWER}.{n}.attention.query_key_value.weight": [5376, 1792] for n in range(63)},
    **{f"{_TOWER}.{n}.attention.dense.weight": [1792, 1792] for n in range(63)},
    **{f"{_TOWER}.{n}.mlp.fc1.weight": [15360, 1792] for n in range(63)},
    **{f"{_TOWER}.{n}.mlp.fc2.weight": [1792, 15360] for n in range(63)},
    "all others of the language model": [1_242_030_080],
    f"all others of {_TOWER}": [14_511_616],
    "all others of transformer.vision.": [214_454_272],
}


class Space(NamedTuple):
    """Bytes: of what is saved at the end, of a checkpoint, of all together, and what is free."""

    model: int
    checkpoint: int
    number: int
    total: int
    free: int


def needed_space(known: Mapping[str, Any], steps: int | None = None) -> Space | None:
    """What a run takes of the disk; None where it cannot be known.

    Args:
        known: Values of a recipe by dotted names.
        steps: Of the run, where max_steps does not say it.
    """
    names = {"model", "trained", "engine.zero_stage", "engine.precision"}
    names |= {"lora.rank", "lora.targets", "lora.use_dora"}
    names |= {"engine.optimizer", "trainer.num_train_epochs", "trainer.max_steps"}
    names |= {"trainer.save_strategy", "trainer.save_steps", "trainer.save_total_limit"}
    names |= {"trainer.load_best_model_at_end"}
    if not known.keys() >= names:
        return None
    shapes: Mapping[str, Sequence[int]] = PUBLISHED_SHAPES
    if known["model"] not in PUBLISHED:
        shapes = shapes_of(Path(known["model"]))
    if not shapes:
        return None  # of others on the Hub, of adapters and of pickled weights it is not known
    model, checkpoint = saved_bytes(known, shapes)
    number = checkpoints_at_once(known, steps)
    there = len([*Path(known["out"]).glob("checkpoint-*")])  # of a run to be continued
    total = model + max(number - there, 0) * checkpoint
    free = shutil.disk_usage(nearest(known["out"])).free
    return Space(model, checkpoint, number, total, free)


def fault_of_space(known: Mapping[str, Any], steps: int | None = None) -> str | None:
    """Why the disk is too small, as far as it can be known; takes what :func:`needed_space`
    does."""
    space = needed_space(known, steps)
    if space is None or space.total <= space.free:
        return None
    saved = f"the model ({in_bytes(space.model)})"
    if space.number:
        saved += f" and up to {space.number} checkpoints at once ({in_bytes(space.checkpoint)} "
        saved += "each)"
    cure = "expected a folder on a larger disk"
    if space.number > 1:
        cure += ", or fewer checkpoints (trainer.save_total_limit, trainer.save_steps)"
    free, total = f"{in_bytes(space.free)}", f"{in_bytes(space.total)}"
    return f"{free} are free there, and {saved} take {total}; {cure}"


def checkpoints_at_once(known: Mapping[str, Any], steps: int | None = None) -> int:
    """The most that lie on the disk: an old one goes when a new one is complete.

    Args:
        known: Values of a recipe by dotted names.
        steps: Of the run, where max_steps does not say it. Until it is known, one checkpoint is
            counted where nothing limits them.
    """
    limit = known["trainer.save_total_limit"]
    strategy = save_strategy({name: known[f"trainer.{name}"] for name in SAVING})
    # The best one is kept beside the newest.
    most = math.inf if limit is None else limit + 1 + known["trainer.load_best_model_at_end"]
    if strategy == "no":
        return 0
    steps = known["trainer.max_steps"] or steps
    if strategy == "steps" and steps is not None:
        saved = (steps - 1) // known["trainer.save_steps"]  # none at the last step
    elif strategy == "epoch" and known["trainer.max_steps"] is None:
        saved = max(math.ceil(known["trainer.num_train_epochs"]) - 1, 0)
    else:
        saved = 1 if most == math.inf else int(most)
    return int(min(saved, most))


def saved_bytes(known: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> tuple[int, int]:
    """Bytes of what is saved at the end, and of a checkpoint.

    Args:
        known: Values of a recipe by dotted names.
        shapes: Of the model's weights, by name.
    """
    what, stage = known["trained"], known["engine.zero_stage"]
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    total = sum(sizes.values())
    adapters = adapter_weights(known, shapes) if is_lora(what) else 0
    parts = parts_trained(what)
    trained = adapters or sum(size for name, size in sizes.items() if part_of(name) in parts)
    frozen = 0 if adapters else total - trained  # of adapters' checkpoints they are left out
    width = 2 if known["engine.precision"] == "bf16" else FP32
    moments = MOMENTS_OF_8_BITS if known["engine.optimizer"] == "adamw_8bit" else MOMENTS
    model = (adapters or total) * width
    if stage == 0:  # trained in fp32, which is rounded at the end
        return model, frozen * width + trained * (FP32 + moments)
    # DeepSpeed keeps fp32 masters, and beside what the Trainer saves a copy of its own: of all
    # weights, or where they are sharded of those that are frozen.
    copied = frozen if stage == 3 else trained + frozen
    return model, model + copied * width + trained * (FP32 + moments)


def adapter_weights(known: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> int:
    """How many weights LoRA adds to a model of such shapes."""
    asked = known["lora.targets"]
    language, tower = ({"query_key_value"} if asked is None else {*asked} for _ in range(2))
    if asked == "all-linear":
        language, tower = {*LANGUAGE_TARGETS}, {*TOWER_TARGETS}
    targets = {"transformer.encoder.": language}
    if known["trained"] == "lora_all":
        targets["transformer.vision.transformer."] = tower
    return sum(
        known["lora.rank"] * sum(shape) + shape[0] * bool(known["lora.use_dora"])
        for name, shape in shapes.items()
        for start, layers in targets.items()
        if name.startswith(start) and name.endswith(".weight") and name.split(".")[-2] in layers
    )
