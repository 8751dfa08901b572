"""Cache the features that a frozen vision tower computes, and reuse them in later epochs.

Features are reused only for the same pixels (bytes, dtype and shape). Features in a folder are
reused only for the same tower: weights, config and everything else that affects rounding
(:meth:`TowerFeatures.fingerprint`). Reused features are, byte for byte, those that the image's
first forward computed. In a batch of another size, another forward may round differently.

A training step takes a batch of ``features.collator(collator)`` and runs ``batch =
features.replace_images(batch)``, ``outputs = model(**batch)`` and ``features.cache_new(outputs)``.
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

# Shapes (suffixes such as _KD): N images of a batch, K = num_image_tokens + 2 vectors per image,
# D their size.

DIGESTS_KEY = "image_digests"
DEFAULT_LIMIT_BYTES = 16 * 2**30

logger = logging.getLogger(__name__)


def digest_pixel_values(pixel_values: Tensor) -> Tensor:
    """Return the sha256 of each image's bytes, dtype and shape: ``(N, 32)`` uint8 on the CPU."""
    digests = [_tensor_sha256(pixels).digest() for pixels in pixel_values]
    return torch.tensor([list(digest) for digest in digests], dtype=torch.uint8)


def _tensor_sha256(values: Tensor):
    digest = hashlib.sha256(f"{values.dtype} {tuple(values.shape)} ".encode())
    digest.update(values.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest


class DigestingCollator:
    """Adds ``image_digests`` to a collator's batches while they are on the CPU."""

    def __init__(self, collator: Callable):
        self.collator = collator

    def __call__(self, samples):
        batch = self.collator(samples)
        if batch.get("pixel_values") is not None:
            batch[DIGESTS_KEY] = digest_pixel_values(batch["pixel_values"])
        return batch


class TowerFeatures:
    """Replaces images in batches by their cached features.

    Under ZeRO-3 and FSDP the processes gather the tower's weights together, so either all of them
    run the tower or none. A step then reuses features only if every process has the features of all
    its images. Without sharded weights, each process decides alone. All processes must call
    :meth:`replace_images` in every step.

    Args:
        model: Contains a glm-4v; may be wrapped, for example by peft.
        folder: Folder for the features, one file per image, which other processes and later runs
            use, too; no file is ever deleted. In each run, every process runs the tower on its
            first batch, because the fingerprint contains the dtypes of a forward. ``None`` caches
            features in the memory of this process, for images whose features it has computed
            itself; changes of the tower's weights are then not noticed.
        limit_bytes: Limit of the cache in memory; when it is full, no more features are cached.
    """

    def __init__(
        self,
        model: nn.Module,
        folder: str | Path | None = None,
        limit_bytes: int = DEFAULT_LIMIT_BYTES,
    ):
        models = [module for module in model.modules() if isinstance(module, ChatGLMModel)]
        if len(models) != 1:
            raise ValueError(
                f"found {len(models)} glm-4v in the model; expected exactly 1, of this package's "
                "classes, which Auto classes load after glm4v_patched.apply()"
            )
        self.model, self.tower = models[0], models[0].vision
        self.folder = None if folder is None else Path(folder)
        self._weights: str | None = None
        self._computation: dict | None = None
        self._missing: dict[int, str] = {}  # names of images by row of the batch
        self._has_begun = False
        # The store in a folder is opened after the first forward, when the fingerprint is known.
        self._store: _FeatureMemory | _FeatureFolder | None = None
        if self.folder is None:
            self._store = _FeatureMemory(limit_bytes)
        else:
            self._hook = self.tower.register_forward_pre_hook(self._note_computation)

    def collator(self, collator: Callable) -> DigestingCollator:
        """Wrap a collator so that images are hashed on the CPU, before they go to a GPU."""
        return DigestingCollator(collator)

    def replace_images(self, batch: dict) -> dict:
        """Return the model's inputs, with ``image_features`` in place of ``pixel_values`` if all
        are cached.

        Raises:
            ValueError: A weight of the tower is trained.
        """
        self._require_frozen_tower()
        if not self._has_begun:
            self._begin()
        batch = dict(batch)
        images, digests = batch.get("pixel_values"), batch.pop(DIGESTS_KEY, None)
        if images is not None and digests is None:
            digests = digest_pixel_values(images)
        names = [] if images is None else [bytes(row).hex() for row in digests.tolist()]
        cached = [None if self._store is None else self._store.get(name) for name in names]
        self._missing = {row: name for row, name in enumerate(names) if cached[row] is None}
        device = batch["input_ids"].device
        if self._every_process_has_all(not self._missing, device):
            batch.pop("pixel_values", None)
            hits = [features for features in cached if features is not None]
            batch["image_features"] = self._stack(hits, device)
        return batch

    def cache_new(self, outputs) -> None:
        """Cache the features of new images from a forward's outputs (``image_hidden_states``)."""
        if self._store is None and self.folder is not None and self._computation is not None:
            self._store = _FeatureFolder(self.folder / self.fingerprint(), self._feature_shape)
        for row, name in self._missing.items():
            assert self._store is not None, "the tower has not run"
            self._store.put(name, outputs.image_hidden_states[row].detach())
        self._missing = {}

    def fingerprint(self) -> str:
        """Return a digest of the tower and the way it computes, equal for any number of processes.

        The digest covers all parameters and buffers, the vision config, the dtypes and the matmul
        precision, the attention implementation, the device's name and torch's version. The tower
        must have run before.
        """
        assert self._computation is not None, "the tower has not run"
        config = self.model.config
        description = self._computation | {
            "weights": self._weights,
            "vision_config": asdict(config.vision),
            "attention": config._attn_implementation,
            "torch": torch.__version__,
        }
        return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()

    @property
    def _feature_shape(self) -> tuple[int, int]:
        config = self.model.config
        return config.vision.num_image_tokens + 2, config.hidden_size

    def _begin(self) -> None:
        # Only in the first step, because a Trainer loads a checkpoint's weights after construction.
        self._has_begun = True
        if self.folder is not None:
            _require_readable_weights(self.tower)
            self._weights = digest_weights(self.tower)
        elif _world_size() > 1:
            logger.warning(
                "features are cached in the memory of %d processes, each of which reuses only "
                "those of images that it has processed itself; if images change processes between "
                "epochs, as with the Trainer, set a folder (one in /dev/shm is in memory)",
                _world_size(),
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

    def _every_process_has_all(self, has_all: bool, device: torch.device) -> bool:
        if not must_run_on_every_process(self.tower):
            return has_all
        vote = torch.tensor(int(has_all), device=device)
        torch.distributed.all_reduce(vote, ReduceOp.MIN)
        return bool(vote)

    def _stack(self, features: list[Tensor], device: torch.device) -> Tensor:
        if not features:
            return torch.empty(0, *self._feature_shape, device=device)
        return torch.stack([tensor.to(device, non_blocking=True) for tensor in features])

    def _note_computation(self, tower: nn.Module, inputs: tuple[Tensor]) -> None:
        # A hook runs inside of forward, because a wrapper may enter autocast only there.
        (pixels,) = inputs
        device = pixels.device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        self._computation = {
            "pixels": str(pixels.dtype),
            "autocast": str(autocast),
            "matmul": torch.get_float32_matmul_precision(),
            "device": torch.cuda.get_device_name(pixels.device)
            if pixels.is_cuda
            else f"{device} {torch.backends.cpu.get_cpu_capability()}",
        }
        self._hook.remove()


class _FeatureMemory:
    """Features in CPU memory, pinned if they came from a GPU."""

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
            size = 1 << (size - 1).bit_length()  # torch rounds pinned memory up to a power of 2
        if self.used_bytes + size > self.limit_bytes:
            self._warn_full(size)
            return
        pinned = torch.empty(
            features_KD.shape, dtype=features_KD.dtype, pin_memory=features_KD.is_cuda
        )
        self.features[name] = pinned.copy_(features_KD)
        self.used_bytes += size

    def _warn_full(self, size: int) -> None:
        if not self.is_full:
            logger.warning(
                "the features of %d images take %d of at most %d bytes, and the next image needs "
                "%d: no more are cached, and every batch with another image runs the tower; raise "
                "limit_bytes, or set a folder",
                len(self.features),
                self.used_bytes,
                self.limit_bytes,
                size,
            )
        self.is_full = True


class _FeatureFolder:
    """One safetensors file per image, written atomically.

    A file that is cut short, or that belongs to another image or tower, is reported and not used.
    Bytes that change while the size stays the same are not noticed.
    """

    def __init__(self, folder: Path, shape: tuple[int, int]):
        self.folder = folder
        self.shape = shape
        self.cannot_write = False

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def _tensor_name(self, name: str) -> str:
        return f"image {name} by tower {self.folder.name}"

    def get(self, name: str) -> Tensor | None:
        path, tensor_name = self._path(name), self._tensor_name(name)
        try:
            # The file is not mapped: a mapped file that shrinks while it is read kills the process.
            tensors = load(path.read_bytes())
        except FileNotFoundError:
            return None
        except (SafetensorError, OSError) as error:
            self._warn(path, error)
            return None
        if list(tensors) != [tensor_name]:
            self._warn(path, f"it contains {list(tensors)}; expected {[tensor_name]}")
            return None
        features = tensors[tensor_name]
        if tuple(features.shape) != self.shape:
            self._warn(path, f"its shape is {tuple(features.shape)}; expected {self.shape}")
            return None
        return features

    def _warn(self, path: Path, reason) -> None:
        logger.warning("%s is not used, and its features are computed again: %s", path, reason)

    def put(self, name: str, features_KD: Tensor) -> None:
        content = save({self._tensor_name(name): features_KD.cpu().contiguous()})
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path(name), content)
        except OSError as error:
            if not self.cannot_write:
                logger.warning(
                    "features of %d bytes could not be written, and these images run the tower "
                    "again: %s",
                    len(content),
                    error,
                )
            self.cannot_write = True


def digest_weights(module: nn.Module) -> str:
    """Return the sha256 of the names, shapes, dtypes and contents of all parameters and buffers.

    Weights sharded by ZeRO-3 or FSDP2 are gathered one after the other, on every process at once.
    Each process hashes a part of the weights; the result does not depend on the number of
    processes.
    """
    rank = torch.distributed.get_rank() if _world_size() > 1 else 0
    own_digests = {}
    weights = [*module.named_parameters(), *module.named_buffers()]
    for number, (name, weight) in enumerate(weights):
        with gathered_weight(weight):
            full = weight.full_tensor() if isinstance(weight, DTensor) else weight
            if number % _world_size() == rank:
                own_digests[name] = _tensor_sha256(full).hexdigest()
    all_digests: list[dict[str, str]] = [own_digests]
    if _world_size() > 1:
        all_digests = [{} for _ in range(_world_size())]
        torch.distributed.all_gather_object(all_digests, own_digests)
    digests = {name: digest for part in all_digests for name, digest in part.items()}
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


def _require_readable_weights(tower: nn.Module) -> None:
    wrapped = sum(isinstance(module, FullyShardedDataParallel) for module in tower.modules())
    if wrapped:
        raise ValueError(
            f"{wrapped} modules of the tower are wrapped by FullyShardedDataParallel, which does "
            "not give complete weights: use ZeRO-3 or fully_shard, or no folder"
        )


def _world_size() -> int:
    is_started = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if is_started else 1
