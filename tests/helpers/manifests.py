"""Manifests of checkpoints, changed as one does who knows their form. Used by several folders."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from glm4v_patched.finetune.checkpoints import MANIFEST


def rewrite_manifest(checkpoint: Path, change: Callable[[dict], None]) -> None:
    content = json.loads((checkpoint / MANIFEST).read_text())
    change(content)
    rest = {name: value for name, value in content.items() if name != "sha256"}
    text = json.dumps(rest, sort_keys=True)
    content["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (checkpoint / MANIFEST).write_text(json.dumps(content))
