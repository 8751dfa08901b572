"""Python runs this when it starts if this folder is on PYTHONPATH; see patch/run.py.

With GLM4V_PATCHED set, glm-4v is patched as soon as transformers has been imported, and frameworks
are told of it as soon as those of their modules have been imported that keep models and templates.
What goes wrong is raised out of that import: what this file itself raises, Python only mentions.
"""

import os
import sys

# What patching imports. It waits until none of these is half imported: peft imports transformers
# when it is imported, and has nothing yet that could be patched by then.
PACKAGES = {"accelerate", "deepspeed", "glm4v_patched", "liger_kernel", "peft", "transformers"}

# Modules of frameworks, and which of glm4v_patched.integrations registers what in them.
PLUGINS = {
    "axolotl.model_support": "axolotl",
    "openrlhf.models.model": "openrlhf",
    "swift.model": "ms_swift",
    "llamafactory.data.template": "llamafactory",
    "llamafactory.model.model_utils.visual": "llamafactory_parts",
}


def spec_by_others(finder, name, path, target):
    others = [f for f in sys.meta_path if f is not finder and hasattr(f, "find_spec")]
    return next(filter(None, (f.find_spec(name, path, target) for f in others)), None)


class PatchAfterImport:
    """Finds these packages where the other finders do, and notes when their imports end."""

    def __init__(self):
        self.depth = 0

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in PACKAGES:
            return None
        spec = spec_by_others(self, name, path, target)
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
            from glm4v_patched.patch.run import apply_environment

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


class RegisterAfterImport:
    """Finds the modules of frameworks, and has our plug-in registered when they are imported."""

    def find_spec(self, name, path=None, target=None):
        if name not in PLUGINS:
            return None
        spec = spec_by_others(self, name, path, target)
        if spec is not None and spec.loader is not None:
            self.watch(spec.loader, PLUGINS[name])
        return spec

    def watch(self, loader, plugin):
        def exec_module(module):
            del loader.exec_module
            loader.exec_module(module)
            import importlib

            importlib.import_module(f"glm4v_patched.integrations.{plugin}").register()

        loader.exec_module = exec_module


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


if __name__ == "sitecustomize":  # and not when run.py takes the second class out of this file
    if os.environ.get("GLM4V_PATCHED", "") not in ("", "0"):
        sys.meta_path[:0] = [PatchAfterImport(), RegisterAfterImport()]
    run_hidden_sitecustomize()
