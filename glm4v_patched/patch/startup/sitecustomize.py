"""Python runs this when it starts if this folder is on PYTHONPATH; see patch/run.py.

With GLM4V_PATCHED set, glm-4v is patched as soon as transformers has been imported, and frameworks
are told of it as soon as those of their modules have been imported that keep models and templates.
What goes wrong is raised out of that import: what this file itself raises, Python only mentions.
"""

import os
import sys

# What patching imports. It waits until none of these is half imported: peft imports transformers
# when it is imported, and has nothing yet that could be patched by then.
PACKAGES = {"accelerate", "deepspeed", "glm4v_patched", "peft", "transformers"}

# Modules of frameworks, and which of glm4v_patched.integrations registers what in them.
PLUGINS = {
    "axolotl.model_support": "axolotl",
    "openrlhf.models.model": "openrlhf",
    "swift.model": "ms_swift",
    "llamafactory.data.template": "llamafactory",
    "llamafactory.model.model_utils.visual": "llamafactory_composite",
}


def find_module_spec(name, path):
    finders = [f for f in sys.meta_path if hasattr(f, "find_spec") and type(f) is not PostImportHook]
    return next(filter(None, (finder.find_spec(name, path) for finder in finders)), None)


class PostImportHook:
    """Finds these modules where the other finders do, and acts when their imports end."""

    def __init__(self):
        self.patches, self.depth = True, 0

    def find_spec(self, name, path=None, target=None):
        if name in PLUGINS or (self.patches and name.partition(".")[0] in PACKAGES):
            spec = find_module_spec(name, path)
            if spec is not None and spec.loader is not None:
                self.watch(spec.loader, name)
            return spec
        return None

    def watch(self, loader, name):
        def exec_module(module):
            del loader.exec_module
            counted = name.partition(".")[0] in PACKAGES
            self.depth += counted
            try:
                loader.exec_module(module)
            finally:
                self.depth -= counted
            if self.patches and self.depth == 0 and "transformers" in sys.modules:
                self.patch()
            if name in PLUGINS:
                import importlib

                plugin = f"glm4v_patched.integrations.{PLUGINS[name]}"
                importlib.import_module(plugin).register()

        loader.exec_module = exec_module

    def patch(self):
        self.patches = False
        try:
            from glm4v_patched.patch.run import apply_from_environment

            apply_from_environment()
        except Exception as error:
            # Whoever tries again is told again.
            self.patches = True
            sys.modules.pop("transformers", None)
            # Not an ImportError, which many take to mean that transformers is not installed.
            raise RuntimeError(
                f"glm-4v could not be patched by GLM4V_PATCHED={os.environ['GLM4V_PATCHED']!r} "
                f"({error}); install glm4v-patched for this Python ({sys.executable}) with a "
                "transformers that it supports, or unset GLM4V_PATCHED"
            ) from error


def run_hidden_sitecustomize():
    """Debian and Colab have one, which this file is found before."""
    here = os.path.dirname(os.path.abspath(__file__))
    spec = find_module_spec(__name__, [path for path in sys.path if os.path.abspath(path) != here])
    if spec is not None and spec.loader is not None:
        module = type(sys)(__name__)
        module.__file__, module.__spec__, module.__loader__ = spec.origin, spec, spec.loader
        sys.modules[__name__] = module
        spec.loader.exec_module(module)


if os.environ.get("GLM4V_PATCHED", "") not in ("", "0"):
    sys.meta_path.insert(0, PostImportHook())
run_hidden_sitecustomize()
