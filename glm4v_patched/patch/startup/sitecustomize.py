"""Post-import hooks that patch glm-4v and register framework plug-ins; see patch/run.py.

Python runs this file at startup if this folder is on PYTHONPATH. If GLM4V_PATCHED is neither
empty nor 0, glm-4v is patched after the import of transformers, and a framework's plug-in is
registered after the import of the module that has the framework's registry. Errors are raised from
these imports, because Python only prints the errors of a sitecustomize.py.
"""

import os
import sys

# Packages that patching imports. Patching waits until none of them is partly imported. For example,
# peft imports transformers before it defines the class that is patched.
PACKAGES = {"accelerate", "deepspeed", "glm4v_patched", "peft", "transformers"}

# Modules of frameworks, and the module of glm4v_patched.integrations that registers its plug-in.
PLUGINS = {
    "axolotl.model_support": "axolotl",
    "openrlhf.models.model": "openrlhf",
    "swift.model": "ms_swift",
    "llamafactory.data.template": "llamafactory",
    "llamafactory.model.model_utils.visual": "llamafactory_composite",
}


def find_module_spec(name, path):
    """Return the spec of a module from the finders of other code, or None if they have none."""
    finders = [
        f for f in sys.meta_path if hasattr(f, "find_spec") and type(f) is not PostImportHook
    ]
    return next(filter(None, (finder.find_spec(name, path) for finder in finders)), None)


class PostImportHook:
    """A meta path finder that delegates to the other finders, and patches after an import."""

    def __init__(self):
        self.must_patch = True
        self.depth = 0  # number of PACKAGES' modules that are being imported

    def find_spec(self, name, path=None, target=None):
        if name in PLUGINS or (self.must_patch and name.partition(".")[0] in PACKAGES):
            spec = find_module_spec(name, path)
            if spec is not None and spec.loader is not None:
                self.wrap_loader(spec.loader, name)
            return spec
        return None

    def wrap_loader(self, loader, name):
        """Make a module's loader patch and register after it has executed the module."""

        def exec_module(module):
            del loader.exec_module  # so that the loader has the method of its class again
            is_counted = name.partition(".")[0] in PACKAGES
            self.depth += is_counted
            try:
                loader.exec_module(module)
            finally:
                self.depth -= is_counted
            if self.must_patch and self.depth == 0 and "transformers" in sys.modules:
                self.patch()
            if name in PLUGINS:
                import importlib

                plugin = f"glm4v_patched.integrations.{PLUGINS[name]}"
                importlib.import_module(plugin).register()

        loader.exec_module = exec_module

    def patch(self):
        self.must_patch = False
        try:
            from glm4v_patched.patch.run import apply_from_environment

            apply_from_environment()
        except Exception as error:
            # Make the next import of transformers try to patch again, and raise the error again.
            self.must_patch = True
            sys.modules.pop("transformers", None)
            # Other code takes an ImportError as a sign that transformers is not installed.
            raise RuntimeError(
                f"glm-4v could not be patched by GLM4V_PATCHED={os.environ['GLM4V_PATCHED']!r} "
                f"({error}); install glm4v-patched for this Python ({sys.executable}) with a "
                "transformers that it supports, or unset GLM4V_PATCHED"
            ) from error


def run_hidden_sitecustomize():
    """Run the sitecustomize.py that this one shadows; Debian and Colab have one."""
    own_folder = os.path.dirname(os.path.abspath(__file__))
    other_folders = [path for path in sys.path if os.path.abspath(path) != own_folder]
    spec = find_module_spec(__name__, other_folders)
    if spec is not None and spec.loader is not None:
        module = type(sys)(__name__)
        module.__file__, module.__spec__, module.__loader__ = spec.origin, spec, spec.loader
        sys.modules[__name__] = module
        spec.loader.exec_module(module)


if os.environ.get("GLM4V_PATCHED", "") not in ("", "0"):
    sys.meta_path.insert(0, PostImportHook())
run_hidden_sitecustomize()
