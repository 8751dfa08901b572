"""Entry point ``python -m glm4v_patched``, the same as ``glm4v-patched``."""

import sys

from .cli import main

sys.exit(main())
