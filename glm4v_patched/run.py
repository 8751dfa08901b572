<<<<<<< HEAD
"""Entry point ``python -m glm4v_patched.run``; see :mod:`glm4v_patched.patch.run`."""
=======
"""``python -m glm4v_patched.run``: the entry point of :mod:`glm4v_patched.patch.run`."""
>>>>>>> m-w-patch

from .patch.run import main

if __name__ == "__main__":
    main()
