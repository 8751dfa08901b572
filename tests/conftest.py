"""One thread, little garbage to look for, and fixtures: tokenizers, processors, what is logged.

The tensors are tiny, and the order of sums must not depend on the machine.
"""

import gc
import json
import os
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers.utils import logging

from glm4v_patched.remote.image_processing_chatglm import ChatGLMImageProcessor
from glm4v_patched.remote.processing_chatglm import ChatGLMProcessor
from glm4v_patched.remote.tokenization_chatglm import SPECIAL_TOKENS, ChatGLM4Tokenizer

pytest.register_assert_rewrite("tests.messages")  # which shows where words differ
torch.set_num_threads(1)
gc.disable()  # while test files are imported; see old_objects_are_no_garbage

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "tests" / "golden"

SENTENCES = [
    "What is in this image?",
    "A cat sits on the mat and looks at the dog.",
    "Describe the image, then say hello to the user.",
    "你好，世界！这是一张图片。",
    "def f(x):\n    return x\n\n",
]


def train_backend(reverse: bool = False) -> Tokenizer:
    """Train a small BPE in which GLM-4's special tokens have the ids 0..13, in either order."""
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        special_tokens=list(reversed(SPECIAL_TOKENS) if reverse else SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(SENTENCES * 4, trainer)
    return backend


def pytest_xdist_auto_num_workers(config) -> int:
    """Three processes run the tests of whole folders, which keeps two cores busy while some of them
    wait for servers and processes; one runs those of a file, or those on GPUs."""
    asked_for_gpus = config.getoption("markexpr") in ("gpu", "two_gpu")
    whole = all(Path(argument.split("::")[0]).is_dir() for argument in config.args)
    return 3 if whole and not asked_for_gpus else 0


@pytest.fixture(scope="session")
def small_backend():
    return train_backend()


@pytest.fixture
def reversed_tokenizer():
    """Return a tokenizer like `tokenizer` with the special tokens' ids in the opposite order."""
    return ChatGLM4Tokenizer(tokenizer_object=train_backend(reverse=True))


@pytest.fixture
def tokenizer(small_backend):
    return ChatGLM4Tokenizer(tokenizer_object=small_backend, model_max_length=8192)


@pytest.fixture
def image_processor():
    """Images of 56: (56 // 14 // 2) ** 2 = 4 positions each."""
    return ChatGLMImageProcessor(size=56)


@pytest.fixture
def processor(image_processor, tokenizer):
    return ChatGLMProcessor(image_processor=image_processor, tokenizer=tokenizer)


@pytest.fixture(scope="session")
def data_dir():
    return DATA


@pytest.fixture(scope="session")
def expected():
    """Ids that upstream's tokenizer gave, on transformers 4.44.2."""
    return json.loads((DATA / "tokenizer_expected.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def real_tokenizer():
    given_folder = os.environ.get("GLM4V_TOKENIZER_DIR")
    folder = Path(given_folder) if given_folder else ROOT.parent / "shared" / "tokenizer"
    if not (folder / "tokenizer.model").is_file():
        pytest.skip(f"no tokenizer.model in {folder}: set GLM4V_TOKENIZER_DIR")
    return ChatGLM4Tokenizer.from_pretrained(folder)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """An empty local Hub, which this process's client uses with a cache of its own."""
    from tests.helpers.local_hub import LocalHub, redirect_client

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache" / "hub"))
    with LocalHub() as hub:
        redirect_client(hub.endpoint, monkeypatch)
        yield hub


@pytest.fixture
def warned(caplog):
    """Collect the warnings and errors that transformers logs, once each."""
    logger = logging.get_logger("transformers")
    # Where the environment has CI=true, transformers hands its records on to the root logger, where
    # caplog listens, too.
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)
    logger.propagate = propagate


@pytest.fixture
def words(snapshot, tmp_path):
    """The room's file of messages: ``with words.refused(ValueError, "rows.jsonl:3"): ...``, or
    ``words(printed)``."""
    from tests.messages import Words  # syrupy is needed where words are compared

    return Words(snapshot, tmp_path)


@pytest.fixture(scope="module", autouse=True)
def old_objects_are_no_garbage():
    """A collection looks at the objects of these tests, not at the million that torch, transformers
    and pytest keep: that takes half a second each time."""
    gc.freeze()
    gc.enable()
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_precision_of_earlier_tests():
    """transformers 4 leaves the precision of a training in the environment, for the next one."""
    yield
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)


@pytest.fixture(autouse=True)
def no_progress_of_a_slow_machine(monkeypatch):
    """What a command prints in this process does not depend on how long it takes."""
    for name in ("FIRST_LINE_SECONDS", "NEXT_LINE_SECONDS"):
        monkeypatch.setattr(f"glm4v_patched.terminal_text.{name}", 600)
