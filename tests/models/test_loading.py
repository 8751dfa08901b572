"""What is loaded beside a model's weights."""

import shutil
from pathlib import Path

from glm4v_patched.models.base import Base
from glm4v_patched.models.loading import load_processor


def test_adapters_bring_their_own_processor_or_have_the_models(files, tmp_path):
    model = str(files.model)
    processor = load_processor(Base(model))
    shared = load_processor(Base(model, adapters=files.adapters))
    assert shared.chat_template == processor.chat_template
    adapters = Path(shutil.copytree(files.adapters, tmp_path / "adapters"))
    processor.chat_template = processor.tokenizer.chat_template = "hello"
    processor.save_pretrained(adapters)
    assert load_processor(Base(model, adapters=adapters)).chat_template == "hello"
