"""Python runs this when it starts if this folder is on PYTHONPATH; see glm4v_patched/run.py.

With GLM4V_PATCHED set, glm-4v is patched as soon as transformers has been imported, and what goes
wrong is raised out of that import: what this file itself raises, Python only mentions.
"""

import os
import sys

# What patching imports. It waits until none of these is half imported: peft imports transformers
# when it is imported, and has nothing yet that could be patched by then.
PACKAGES = {"accelerate", "deepspeed", "glm4v_patched", "liger_kernel", "peft", "transformers"}


class PatchAfterImport:
    """Finds these packages where the other finders do, and notes when their imports end."""

    def __init__(self):
        self.depth = 0

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in PACKAGES:
            return None
        others = [f for f in sys.meta_path if f is not self and hasattr(f, "find_spec")]
        spec = next(filter(None, (f.find_spec(name, path, target) for f in others)), None)
        if spec is not None and spec.loader is not None:
            self.watch(spec.loader)
        return spec

    def watch(self, loader):
        def exec_module(module):
            del loader.exec_module
            self.depth += 1
            try:
                loader.exec_module(module)
            finally:
                self.depth -= 1
            if self.depth == 0 and "transformers" in sys.modules and self in sys.meta_path:
                self.patch()

        loader.exec_module = exec_module

    def patch(self):
        sys.meta_path.remove(self)
        try:
            from glm4v_patched.run import apply_environment

            apply_environment()
        except Exception as error:
            # Whoever tries again is told again.
            sys.meta_path.insert(0, self)
            sys.modules.pop("transformers", None)
            # Not an ImportError, which many take to mean that transformers is not installed.
            raise RuntimeError(
                f"glm-4v could not be patched ({error}); install glm4v-patched for this Python "
                f"({sys.executable}) with a transformers that it supports, or unset GLM4V_PATCHED"
            ) from error


def run_hidden_sitecustomize():
    """Debian and Colab have one, which this file is found before."""
    here = os.path.dirname(os.path.abspath(__file__))
    paths = [path for path in sys.path if os.path.abspath(path) != here]
    finders = [f for f in sys.meta_path if hasattr(f, "find_spec")]
    spec = next(filter(None, (f.find_spec(__name__, paths) for f in finders)), None)
    if spec is not None and spec.loader is not None:
        module = type(sys)(__name__)
        module.__file__, module.__spec__, module.__loader__ = spec.origin, spec, spec.loader
        sys.modules[__name__] = module
        spec.loader.exec_module(module)


if os.environ.get("GLM4V_PATCHED", "") not in ("", "0"):
    sys.meta_path.insert(0, PatchAfterImport())
run_hidden_sitecustomize()
