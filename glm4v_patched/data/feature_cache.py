"""Cache the features that a frozen vision tower computes, and reuse them in later epochs.

Features are reused only for the same pixels (bytes, dtype and shape). Features in a folder are
reused only for the same tower: weights, config and everything else that affects rounding
(:meth:`TowerFeatures.fingerprint`). Reused features are, byte for byte, those of the image's first
forward pass. If they were computed again in a batch of another size, they might be rounded
differently.

A training step with ``features``, a :class:`TowerFeatures`, takes a batch from
``features.collator(collator)`` and runs::

    batch = features.replace_images(batch)
    outputs = model(**batch)
    features.cache_new(outputs)
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

# Shapes, also in suffixes of names such as features_KD: N images of a batch, K = num_image_tokens
# + 2 vectors per image (of the image's tokens, and of its begin and end), and D values per vector.

DIGESTS_KEY = "image_digests"  # key of a batch
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

    Under ZeRO-3 and FSDP, the processes gather the tower's weights together, so either all of them
    run the tower or none. A step then reuses features only if every process has the features of all
    of its images. Without sharded weights, each process decides alone. All processes must call
    :meth:`replace_images` in every step.

    Args:
        model: Contains a glm-4v; may be wrapped, for example by peft.
        folder: Folder with a file of features per image, which all processes and later runs share.
            No file is ever deleted. In each run, every process runs the tower on its first batch,
            because the fingerprint contains the dtypes of a forward pass. If ``folder`` is None,
            each process caches in its memory the features that it has computed. Changes of the
            tower's weights are then not noticed.
        limit_bytes: Limit of the cache in memory. When it is full, no more features are cached.
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
                f"the model contains {len(models)} models of this package's class ChatGLMModel; "
                "expected exactly 1: call glm4v_patched.apply() before you load it by an Auto class"
            )
        self.model, self.tower = models[0], models[0].vision
        self.folder = None if folder is None else Path(folder)
        self._weights_digest: str | None = None
        self._computation: dict | None = None  # dtypes and device of the tower's forward pass
        self._missing: dict[int, str] = {}  # digests of images without features, by index
        self._has_begun = False
        # The store in a folder is opened after the first forward, when the fingerprint is known.
        self._store: _FeatureMemory | _FeatureFolder | None = None
        if self.folder is None:
            self._store = _FeatureMemory(limit_bytes)
        else:
            self._hook = self.tower.register_forward_pre_hook(self._record_computation)

    def collator(self, collator: Callable) -> DigestingCollator:
        """Wrap a collator so that images are hashed on the CPU, before they go to a GPU."""
        return DigestingCollator(collator)

    def replace_images(self, batch: dict) -> dict:
        """Return the model's inputs, with ``image_features`` in place of ``pixel_values`` if the
        features of all images are cached.

        Raises:
            ValueError: A weight of the tower is trained.
        """
        self._require_frozen_tower()
        if not self._has_begun:
            self._begin()
        batch = dict(batch)
        images, digest_bytes = batch.get("pixel_values"), batch.pop(DIGESTS_KEY, None)
        if images is not None and digest_bytes is None:
            digest_bytes = digest_pixel_values(images)
        digests = [] if images is None else [bytes(row).hex() for row in digest_bytes.tolist()]
        cached = [None if self._store is None else self._store.get(digest) for digest in digests]
        self._missing = {i: digest for i, digest in enumerate(digests) if cached[i] is None}
        device = batch["input_ids"].device
        if self._every_process_has_all(not self._missing, device):
            batch.pop("pixel_values", None)
            hits = [features for features in cached if features is not None]
            batch["image_features"] = self._stack(hits, device)
        return batch

    def cache_new(self, outputs) -> None:
        """Cache the features of images that :meth:`replace_images` did not replace, from
        ``image_hidden_states`` of the model's outputs."""
        if self._store is None and self.folder is not None and self._computation is not None:
            self._store = _FeatureFolder(self.folder / self.fingerprint(), self._feature_shape)
        for index, digest in self._missing.items():
            assert self._store is not None, "the tower has not run"
            self._store.put(digest, outputs.image_hidden_states[index].detach())
        self._missing = {}

    def fingerprint(self) -> str:
        """Return a digest of the tower and of everything that affects its rounding.

        The digest covers all parameters and buffers, the vision config, the dtypes, the matmul
        precision, the attention implementation, the device's name and torch's version. It does not
        depend on the number of processes. The tower must have run before.
        """
        assert self._computation is not None, "the tower has not run"
        config = self.model.config
        description = self._computation | {
            "weights": self._weights_digest,
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
        # Called in the first step, because a Trainer loads a checkpoint's weights only before it.
        self._has_begun = True
        if self.folder is not None:
            _require_readable_weights(self.tower)
            self._weights_digest = digest_weights(self.tower)
        elif _world_size() > 1:
            logger.warning(
                "each of %d processes caches features in its own memory, and reuses only features "
                "that it has computed itself. If an image may come to another process in the next "
                "epoch, as with the Trainer, set a folder (a folder in /dev/shm is in memory)",
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
        """Return ``has_all``; if all processes must run the tower together, the minimum of all."""
        if not must_run_on_every_process(self.tower):
            return has_all
        minimum = torch.tensor(int(has_all), device=device)
        torch.distributed.all_reduce(minimum, ReduceOp.MIN)
        return bool(minimum)

    def _stack(self, features: list[Tensor], device: torch.device) -> Tensor:
        if not features:
            return torch.empty(0, *self._feature_shape, device=device)
        return torch.stack([tensor.to(device, non_blocking=True) for tensor in features])

    def _record_computation(self, tower: nn.Module, inputs: tuple[Tensor]) -> None:
        # This is a hook of the tower, because a wrapper may enter autocast only inside of forward.
        (pixels,) = inputs
        device = pixels.device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        if pixels.is_cuda:
            device_name = torch.cuda.get_device_name(pixels.device)
        else:
            device_name = f"{device} {torch.backends.cpu.get_cpu_capability()}"
        self._computation = {
            "pixels": str(pixels.dtype),
            "autocast": str(autocast),
            "matmul": torch.get_float32_matmul_precision(),
            "device": device_name,
        }
        self._hook.remove()


class _FeatureMemory:
    """Features in CPU memory, by digest of the image; pinned if they came from a GPU."""

    def __init__(self, limit_bytes: int):
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.is_full = False
        self.features: dict[str, Tensor] = {}

    def get(self, digest: str) -> Tensor | None:
        return self.features.get(digest)

    def put(self, digest: str, features_KD: Tensor) -> None:
        if digest in self.features:  # the image is twice in one batch
            return
        size = features_KD.nbytes
        if features_KD.is_cuda:
            size = 1 << (size - 1).bit_length()  # torch rounds pinned memory up to a power of 2
        if self.used_bytes + size > self.limit_bytes:
            self._warn_full(size)
            return
        copied = torch.empty(
            features_KD.shape, dtype=features_KD.dtype, pin_memory=features_KD.is_cuda
        )
        self.features[digest] = copied.copy_(features_KD)
        self.used_bytes += size

    def _warn_full(self, size: int) -> None:
        if not self.is_full:
            logger.warning(
                "the features of %d images take %d of at most %d bytes, and the next image needs "
                "%d: no more features are cached, and every batch with an image that is not cached "
                "runs the tower; raise limit_bytes, or set a folder",
                len(self.features),
                self.used_bytes,
                self.limit_bytes,
                size,
            )
        self.is_full = True


class _FeatureFolder:
    """Features in a folder, one safetensors file per image, written atomically.

    A file that is cut short, or that belongs to another image or tower, is reported and not used.
    Changed bytes in a file of the same size are not noticed.

    Args:
        folder: Its name is the fingerprint of the tower.
        shape: Shape of the features of an image, ``(K, D)``.
    """

    def __init__(self, folder: Path, shape: tuple[int, int]):
        self.folder = folder
        self.shape = shape
        self.cannot_write = False

    def _path(self, digest: str) -> Path:
        return self.folder / f"{digest}.safetensors"

    def _tensor_name(self, digest: str) -> str:
        return f"image {digest} by tower {self.folder.name}"

    def get(self, digest: str) -> Tensor | None:
        path, tensor_name = self._path(digest), self._tensor_name(digest)
        try:
            # The file is not memory-mapped: if a mapped file shrinks, reading it kills the process.
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

    def put(self, digest: str, features_KD: Tensor) -> None:
        content = save({self._tensor_name(digest): features_KD.cpu().contiguous()})
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path(digest), content)
        except OSError as error:
            if not self.cannot_write:
                logger.warning(
                    "features of %d bytes could not be written, so that the tower computes them "
                    "again in later epochs: %s",
                    len(content),
                    error,
                )
            self.cannot_write = True


def digest_weights(module: nn.Module) -> str:
    """Return the sha256 of the names, shapes, dtypes and contents of all parameters and buffers.

    Weights that ZeRO-3 or FSDP2 shards are gathered one after the other, by all processes together.
    Each process hashes some of the weights. The result does not depend on the number of processes.
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
    digests = {name: digest for by_name in all_digests for name, digest in by_name.items()}
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
