"""``python -m glm4v_patched.run``: the entry point of :mod:`glm4v_patched.patch.run`."""

from .patch.run import main

if __name__ == "__main__":
    main()
