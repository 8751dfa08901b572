"""What a frozen vision tower makes of an image, computed once and used again in later epochs.

An image's features are used again only for the same pixels (their bytes, dtype and shape), in a
folder also only for the same tower: its weights, its config and what else decides how it rounds
(:meth:`TowerFeatures.fingerprint`). What is used is what the tower gave, byte for byte, when it met
the image first. In a batch of another size it may round differently, as it always does.

Every step of a training goes ``batch = features.replace_images(batch)``, ``outputs =
model(**batch)``, ``features.keep(outputs)``, on batches of ``features.collator(collator)``.
"""

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from ..atomic import write_atomically
from ..engine.deepspeed.internals import gathered_weight
from ..remote.modeling_chatglm import ChatGLMModel
from ..remote.sharding import must_run_on_every_process

# Shapes: N images of a batch, K = num_image_tokens + 2 vectors of one, D their width.

DIGESTS = "image_digests"
DEFAULT_LIMIT_BYTES = 16 * 2**30

logger = logging.getLogger(__name__)


def digest_images(pixel_values: Tensor) -> Tensor:
    """sha256 of each image's bytes, dtype and shape: ``(N, 32)`` uint8, on the CPU."""
    digests = [_sha256(pixels).digest() for pixels in pixel_values]
    return torch.tensor([list(digest) for digest in digests], dtype=torch.uint8)


def _sha256(values: Tensor):
    digest = hashlib.sha256(f"{values.dtype} {tuple(values.shape)} ".encode())
    digest.update(values.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest


class DigestingCollator:
    """Adds ``image_digests`` to a collator's batches, which are still on the CPU."""

    def __init__(self, collator: Callable):
        self.collator = collator

    def __call__(self, samples):
        batch = self.collator(samples)
        if batch.get("pixel_values") is not None:
            batch[DIGESTS] = digest_images(batch["pixel_values"])
        return batch


class TowerFeatures:
    """Gives a model the features of images that it has met before, in place of the images.

    Where processes gather the tower together (ZeRO-3, FSDP) it runs on all of them or on none: a
    step reuses features only if every process has those of all its images. Elsewhere each
    process sees to itself. All must call :meth:`replace_images` in every step.

    Args:
        model: Holds a glm-4v; may be wrapped, by peft for one.
        folder: Where features are kept, one file an image, for all processes that see the folder
            and for later runs; nothing is ever deleted. In each run and process the tower runs on
            the first batch even so, which shows how it computes. ``None`` keeps them in the memory
            of this process, which knows only the images that it met itself, and does not notice
            if the tower's weights are changed meanwhile.
        limit_bytes: Of memory. What comes when it is full is not kept.
    """

    def __init__(
        self,
        model: nn.Module,
        folder: str | Path | None = None,
        limit_bytes: int = DEFAULT_LIMIT_BYTES,
    ):
        found = [module for module in model.modules() if isinstance(module, ChatGLMModel)]
        if len(found) != 1:
            raise ValueError(
                f"found {len(found)} glm-4v in the model; expected exactly 1, of this package's "
                "classes, which glm4v_patched.apply() makes Auto classes load"
            )
        self.model, self.tower = found[0], found[0].vision
        self.folder = None if folder is None else Path(folder)
        self._weights: str | None = None
        self._computation: dict | None = None
        self._awaited: dict[int, str] = {}
        self._has_begun = False
        # Not a folder's until it is known how the tower computes.
        self._store: _Memory | _Folder | None = None
        if self.folder is None:
            self._store = _Memory(limit_bytes)
        else:
            self._hook = self.tower.register_forward_pre_hook(self._note_computation)

    def collator(self, collator: Callable) -> DigestingCollator:
        """Hashes images where they are made: on the CPU, before they go to a GPU."""
        return DigestingCollator(collator)

    def replace_images(self, batch: dict) -> dict:
        """The model's inputs: ``image_features`` in place of ``pixel_values`` if all are known.

        Raises:
            ValueError: a weight of the tower is trained.
        """
        self._require_frozen_tower()
        if not self._has_begun:
            self._begin()
        batch = dict(batch)
        images, digests = batch.get("pixel_values"), batch.pop(DIGESTS, None)
        if images is not None and digests is None:
            digests = digest_images(images)
        names = [] if images is None else [bytes(row).hex() for row in digests.tolist()]
        found = [None if self._store is None else self._store.get(name) for name in names]
        self._awaited = {row: name for row, name in enumerate(names) if found[row] is None}
        device = batch["input_ids"].device
        if self._on_every_process(not self._awaited, device):
            batch.pop("pixel_values", None)
            known = [features for features in found if features is not None]
            batch["image_features"] = self._stacked(known, device)
        return batch

    def keep(self, outputs) -> None:
        """Keep the new images' features of a forward: its ``image_hidden_states``."""
        if self._store is None and self.folder is not None and self._computation is not None:
            self._store = _Folder(self.folder / self.fingerprint(), self._feature_shape)
        for row, name in self._awaited.items():
            assert self._store is not None, "the tower has not run"
            self._store.put(name, outputs.image_hidden_states[row].detach())
        self._awaited = {}

    def fingerprint(self) -> str:
        """The same for the same tower on the same kind of device, for any number of processes.

        Depends on all parameters and buffers, the vision config, the dtype of the computation, the
        attention implementation, the device and torch's version. Known once the tower has run.
        """
        assert self._computation is not None, "the tower has not run"
        config = self.model.config
        facts = self._computation | {
            "weights": self._weights,
            "vision_config": asdict(config.vision),
            "attention": config._attn_implementation,
            "torch": torch.__version__,
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    @property
    def _feature_shape(self) -> tuple[int, int]:
        config = self.model.config
        return config.vision.num_image_tokens + 2, config.hidden_size

    def _begin(self) -> None:
        # Not earlier: a Trainer loads a checkpoint's weights after everything is made.
        self._has_begun = True
        if self.folder is not None:
            _require_readable_weights(self.tower)
            self._weights = digest_weights(self.tower)
        elif _processes() > 1:
            logger.warning(
                "features are kept in the memory of %d processes, each of which reuses only those "
                "of images that it met itself; if images change processes between epochs, as "
                "with the Trainer, give a folder (one in /dev/shm is memory)",
                _processes(),
            )

    def _require_frozen_tower(self) -> None:
        parameters = dict(self.tower.named_parameters())
        trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
        if trained:
            raise ValueError(
                f"{len(trained)} of the tower's {len(parameters)} parameters are trained (one is "
                f"{trained[0]}), so that its features change with every step: freeze the tower "
                "(model.transformer.vision.requires_grad_(False)), or do not reuse features"
            )

    def _on_every_process(self, has_all: bool, device: torch.device) -> bool:
        if not must_run_on_every_process(self.tower):
            return has_all
        vote = torch.tensor(int(has_all), device=device)
        torch.distributed.all_reduce(vote, ReduceOp.MIN)
        return bool(vote)

    def _stacked(self, features: list[Tensor], device: torch.device) -> Tensor:
        if not features:
            return torch.empty(0, *self._feature_shape, device=device)
        return torch.stack([of_one.to(device, non_blocking=True) for of_one in features])

    def _note_computation(self, tower: nn.Module, inputs: tuple[Tensor]) -> None:
        # Only inside of the forward is it certain: who wraps it may enter autocast there.
        (pixels,) = inputs
        kind = pixels.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        self._computation = {
            "pixels": str(pixels.dtype),
            "autocast": str(autocast),
            "matmul": torch.get_float32_matmul_precision(),
            "device": torch.cuda.get_device_name(pixels.device)
            if pixels.is_cuda
            else f"{kind} {torch.backends.cpu.get_cpu_capability()}",
        }
        self._hook.remove()


class _Memory:
    """Features on the CPU, page-locked if they came from a GPU."""

    def __init__(self, limit_bytes: int):
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.is_full = False
        self.features: dict[str, Tensor] = {}

    def get(self, name: str) -> Tensor | None:
        return self.features.get(name)

    def put(self, name: str, features_KD: Tensor) -> None:
        if name in self.features:  # twice in one batch
            return
        size = features_KD.nbytes
        if features_KD.is_cuda:
            size = 1 << (size - 1).bit_length()  # what torch takes for it when page-locked
        if self.used_bytes + size > self.limit_bytes:
            self._say_full(size)
            return
        kept = torch.empty(
            features_KD.shape, dtype=features_KD.dtype, pin_memory=features_KD.is_cuda
        )
        self.features[name] = kept.copy_(features_KD)
        self.used_bytes += size

    def _say_full(self, size: int) -> None:
        if not self.is_full:
            logger.warning(
                "the features of %d images take %d of at most %d bytes, and the next %d: no more "
                "are kept, and every batch with another image runs the tower; raise limit_bytes, "
                "or give a folder",
                len(self.features),
                self.used_bytes,
                self.limit_bytes,
                size,
            )
        self.is_full = True


class _Folder:
    """One safetensors file an image, under a name only once it is written to its end.

    A file that is cut short, or that is not of this image and tower, is named and never used.
    Bytes that change while the size stays are not noticed.
    """

    def __init__(self, folder: Path, shape: tuple[int, int]):
        self.folder = folder
        self.shape = shape
        self.cannot_write = False

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def _title(self, name: str) -> str:
        return f"image {name} by tower {self.folder.name}"

    def get(self, name: str) -> Tensor | None:
        path, title = self._path(name), self._title(name)
        try:
            # Read and not mapped: a mapped file that shrinks meanwhile kills the process.
            tensors = load(path.read_bytes())
        except FileNotFoundError:
            return None
        except (SafetensorError, OSError) as error:
            self._ignore(path, error)
            return None
        if list(tensors) != [title]:
            self._ignore(path, f"it holds {list(tensors)}; expected {[title]}")
            return None
        features = tensors[title]
        if tuple(features.shape) != self.shape:
            self._ignore(path, f"its shape is {tuple(features.shape)}; expected {self.shape}")
            return None
        return features

    def _ignore(self, path: Path, reason) -> None:
        logger.warning("%s is not used, and its features are computed again: %s", path, reason)

    def put(self, name: str, features_KD: Tensor) -> None:
        content = save({self._title(name): features_KD.cpu().contiguous()})
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path(name), content)
        except OSError as error:
            if not self.cannot_write:
                logger.warning(
                    "features of %d bytes could not be written, and such images run the tower "
                    "again: %s",
                    len(content),
                    error,
                )
            self.cannot_write = True


def digest_weights(module: nn.Module) -> str:
    """sha256 of the names, shapes, dtypes and contents of all parameters and buffers.

    Whole weights, and such as ZeRO-3 or FSDP2 shard, which are gathered one after the other, on
    every process at once. Each process hashes its share of them; the outcome does not depend on how
    many there are.
    """
    rank = torch.distributed.get_rank() if _processes() > 1 else 0
    mine = {}
    weights = [*module.named_parameters(), *module.named_buffers()]
    for number, (name, weight) in enumerate(weights):
        with gathered_weight(weight):
            whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
            if number % _processes() == rank:
                mine[name] = _sha256(whole).hexdigest()
    shares: list[dict[str, str]] = [mine]
    if _processes() > 1:
        shares = [{} for _ in range(_processes())]
        torch.distributed.all_gather_object(shares, mine)
    digests = {name: digest for share in shares for name, digest in share.items()}
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


def _require_readable_weights(tower: nn.Module) -> None:
    number = sum(isinstance(part, FullyShardedDataParallel) for part in tower.modules())
    if number:
        raise ValueError(
            f"{number} parts of the tower are wrapped by FullyShardedDataParallel, under which 0 "
            "whole weights can be read: use ZeRO-3 or fully_shard, or no folder"
        )


def _processes() -> int:
    is_started = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if is_started else 1
